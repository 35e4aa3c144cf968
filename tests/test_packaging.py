"""The distribution holds every package, and the top level exports what it says."""

import importlib
import pathlib
import tomllib

import pytest

import kvpatch

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def folders() -> dict[str, pathlib.Path]:
    """Package name -> folder, of every folder with an __init__.py under the packages' own roots."""
    found = {}
    for package, folder in SETUPTOOLS["package-dir"].items():
        for file in (ROOT / folder).rglob("__init__.py"):
            below = file.parent.relative_to(ROOT / folder).parts
            found[".".join((package, *below))] = file.parent
    return found


def test_every_package_is_listed_and_every_listed_package_exists():
    assert sorted(SETUPTOOLS["packages"]) == sorted(folders())


def test_no_module_lies_in_a_folder_that_is_no_package():
    for folder in SETUPTOOLS["package-dir"].values():
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), f"{file} would not be in the wheel"


def test_no_package_is_left_out_of_the_roots():
    roots = {ROOT / folder for folder in SETUPTOOLS["package-dir"].values()}
    others = {file.parent for file in ROOT.glob("*/__init__.py")} - roots
    assert {folder.name for folder in others} <= {"tests"}


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_a_listed_package_is_imported_from_its_folder(package):
    module = importlib.import_module(package)
    assert pathlib.Path(module.__file__).resolve().parent == folders()[package].resolve()


def test_data_files_that_lie_beside_a_package_are_packaged():
    for package, folder in folders().items():
        patterns = SETUPTOOLS["package-data"].get(package, [])
        data = {file for pattern in patterns for file in folder.glob(pattern)}
        others = {
            file
            for file in folder.iterdir()
            if file.is_file() and file.suffix not in (".py", ".pyc") and file not in data
        }
        assert not others, f"{package} would leave out {sorted(others)}"


def test_what_is_exported_exists_and_is_sorted():
    assert kvpatch.__all__ == sorted(kvpatch.__all__)
    assert len(set(kvpatch.__all__)) == len(kvpatch.__all__)
    for name in kvpatch.__all__:
        assert getattr(kvpatch, name) is not None


@pytest.mark.parametrize(
    "name",
    [
        "patch",
        "unpatch",
        "patched",
        "explain",
        "list_policies",
        "list_scorers",
        "register_scorer",
        "Policy",
        "Budget",
        "SlotCache",
    ],
)
def test_the_public_interface_is_exported_with_a_docstring(name):
    assert name in kvpatch.__all__
    assert getattr(kvpatch, name).__doc__


def test_every_public_object_of_kvpatch_is_exported():
    named = {
        name
        for name, value in vars(kvpatch).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("kvpatch")
    }
    assert named == set(kvpatch.__all__)


def test_errors_have_one_base_and_are_the_errors_a_caller_expects():
    for name in ("BackendError", "UnsupportedModelError", "VerificationError"):
        assert issubclass(getattr(kvpatch, name), kvpatch.KVPatchError)
    assert issubclass(kvpatch.UnsupportedModelError, ValueError)


def test_the_version_is_the_projects():
    assert kvpatch.__version__ == PROJECT["project"]["version"]


def test_the_command_points_at_a_function():
    module, function = PROJECT["project"]["scripts"]["kvpatch"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
