"""On a GPU: the kernels are the formula, and captured steps are eager ones. The checks are those of `gpu_check`."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

from kvpatch.profiling import kernel_checks, loop_checks, operator_checks, runner_checks
from kvpatch.profiling.models import Place
from kvpatch.profiling.parts import Skipped

pytestmark = pytest.mark.gpu
PLACE = Place(torch.device("cuda", torch.cuda.current_device()), small=False)


def names(part) -> str:
    return part.name


@pytest.fixture(autouse=True)
def tidied():
    yield
    PLACE.tidy()


def holds(part) -> None:
    """The part says what it saw, where it can run; it raises a sentence where something does not hold."""
    try:
        seen = part.run()
    except Skipped as reason:
        pytest.skip(str(reason))
    assert seen, f"{part.name} must say what it saw"


@pytest.mark.parametrize("part", [*kernel_checks.parts(PLACE), *kernel_checks.more_parts(PLACE)], ids=names)
def test_kernels_compute_the_formula_and_leave_what_the_packed_path_leaves(part):
    holds(part)


@pytest.mark.parametrize("part", operator_checks.parts(PLACE), ids=names)
def test_operators_are_what_their_schemas_say(part):
    holds(part)


@pytest.mark.parametrize("part", [*loop_checks.parts(PLACE), *loop_checks.more_parts(PLACE)], ids=names)
def test_however_steps_are_started_the_tokens_are_those_of_eager_steps(part):
    holds(part)


@pytest.mark.parametrize("part", runner_checks.parts(PLACE), ids=names)
def test_steps_are_captured_once_without_copies_or_waiting(part):
    holds(part)
