"""The matrix product of a few rows: right for any shape, in both precisions, alone and inside a compiled function."""

import pytest
import torch
from factories import left_padded, llama, prompts, run
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch import decoder, linear


def exact(x, weight):
    return x.double() @ weight.double().T


@pytest.mark.skipif(linear._kernel() is None, reason="no C++ compiler that inductor can use, so BLAS is used")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, linear.MOST_ROWS),
    outputs=st.integers(1, 40),
    width=st.integers(1, 90),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_a_few_rows_equal_the_exact_product(rows, outputs, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, width, generator=generator).to(dtype)
    weights = [torch.randn(size, width, generator=generator).to(dtype) for size in (outputs, 7)]
    for got, weight in zip(linear._linears(x, weights), weights, strict=True):
        assert got.dtype == dtype and got.shape == (rows, 1, weight.shape[0])
        # Sums in float32 of `width` products of size 1, then one rounding to the input's precision.
        bound = 1e-6 * width + (2**-8 * exact(x, weight).abs() if dtype == torch.bfloat16 else 0.0)
        assert ((got.double() - exact(x, weight)).abs() <= bound + 1e-6).all()


def test_many_rows_and_strided_weights_are_left_to_blas():
    x, weight = torch.randn(linear.MOST_ROWS + 1, 8), torch.randn(16, 8)
    torch.testing.assert_close(linear._linears(x, [weight])[0], x @ weight.T)
    strided = torch.randn(8, 16).T
    torch.testing.assert_close(linear._linears(x[:2], [strided])[0], x[:2] @ strided.T)


class Branches(torch.nn.Module):
    """Two products of one input, one with a bias, and one of their sum."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 16, bias=False), torch.nn.Linear(24, 16)
        self.last = torch.nn.Linear(16, 5, bias=False)
        self.to(dtype)

    def forward(self, x):
        # One product of a product, as adapters have it.
        return self.last(torch.sigmoid(self.first(x)) * self.second(x)) + self.last(self.first(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_compiled_module_gives_the_same_with_its_linears_replaced(rows, dtype):
    torch.manual_seed(0)
    module = Branches(dtype)
    x = torch.randn(rows, 1, 24, dtype=dtype)
    graphs = []

    def backend(graph, inputs):
        linear.replace_linears(graph)
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    with torch.no_grad():
        got = torch.compile(module, backend=backend, fullgraph=True)(x)
        expected = module(x)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    kept = torch._C._nn.linear in graphs[0]
    # float64 is left alone; with several rows a product with a bias is.
    assert kept == (dtype == torch.float64 or (rows > 1))
    assert (linear.one_row in graphs[0]) == (rows == 1 and dtype != torch.float64)


@pytest.mark.skipif(linear._kernel() is None, reason="no C++ compiler that inductor can use, so BLAS is used")
def test_every_product_of_a_compiled_step_is_an_own_one(monkeypatch):
    products = []
    original = linear._kernel()

    def counting(x, weight, output, *sizes):
        products.append(tuple(weight.shape))
        return original(x, weight, output, *sizes)

    monkeypatch.setattr(linear, "_kernel", lambda: counting)
    model = llama(layers=3, dtype=torch.float32)
    with kvpatch.patched(model, "inertia", budget=8):
        run(model, max_new_tokens=4)
    of_a_layer = {"q", "k", "v", "o", "gate", "up", "down"}
    assert len(products) == 3 * (3 * len(of_a_layer) + 1)  # three steps of three layers, and the head


def test_a_single_row_leaves_no_call_of_blas():
    graphs = []
    original = linear.replace_linears

    def replaced(graph):
        original(graph)
        graphs.append([node.target for node in graph.graph.find_nodes(op="call_function", target=linear.one_row)])
        assert not list(graph.graph.find_nodes(op="call_function", target=torch._C._nn.linear))

    model = llama(layers=3, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(decoder, "replace_linears", replaced)
        with kvpatch.patched(model, "inertia", budget=8):
            run(model, left_padded(prompts((20,))), max_new_tokens=4)
    assert [len(targets) for targets in graphs] == [7, 1]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_process_default_dtype_does_not_matter(default):
    x, weight = torch.randn(3, 24), torch.randn(7, 24)
    torch.set_default_dtype(default)
    try:
        got = linear._linears(x, [weight])[0]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, x @ weight.T)
