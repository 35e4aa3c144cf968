"""Matrix products of a decode step on a CPU: a few rows against a whole weight matrix.

Such a product must read the weights once and do little else, so it is bound by memory bandwidth. The BLAS behind
`torch.nn.functional.linear` reaches about half of it at 1 to 16 rows. Here each block of weight rows is read once and
multiplied with all rows of the input while it lies in registers.

Bytes a call: the weights once (N K itemsize), input and output negligible. Sums are taken in float32.
"""

import functools
import logging
import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.nn.functional import linear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MOST_ROWS = 32  # with more rows the product is bound by arithmetic, which BLAS does well
_LOG = logging.getLogger(__name__)

_SOURCE = r"""
#include <cstdint>
// Vectors of GCC and Clang: as wide as a 512-bit register, and split by the compiler where registers are narrower.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
typedef float vec __attribute__((vector_size(64)));
typedef float vec_unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint16_t half_unaligned __attribute__((vector_size(32), aligned(2)));
typedef uint32_t words __attribute__((vector_size(64)));
constexpr int64_t LANES = 16;
constexpr int AHEAD = 1;

static inline vec load(const float* p) { return *(const vec_unaligned*)p; }
static inline vec load(const uint16_t* p) {  // bfloat16 is the upper half of a float
    return (vec)(__builtin_convertvector(*(const half_unaligned*)p, words) << 16);
}
static inline float one(const float* p) { return *p; }
static inline float one(const uint16_t* p) {
    union { uint32_t bits; float value; } u = {(uint32_t)*p << 16};
    return u.value;
}

static inline float total(vec s) {
    auto eight = __builtin_shufflevector(s, s, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(s, s, 8, 9, 10, 11, 12, 13, 14, 15);
    auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

// out[m, n] = sum_k x[m, k] w[n, k] for MT rows of x and NT rows of w.
template <typename W, int NT, int MT>
static inline void tile(const float* x, const W* w, float* out, int64_t N, int64_t K) {
    vec sums[NT][MT] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        vec b[NT];
        for (int n = 0; n < NT; n++) {
            b[n] = load(w + n * K + k);
            if (AHEAD) __builtin_prefetch(w + (n + AHEAD * NT) * K + k);  // the block after this one
        }
        for (int m = 0; m < MT; m++) {
            vec a = load(x + m * K + k);
            for (int n = 0; n < NT; n++) sums[n][m] += a * b[n];
        }
    }
    for (int n = 0; n < NT; n++)
        for (int m = 0; m < MT; m++) {
            float sum = total(sums[n][m]);
            for (int64_t rest = k; rest < K; rest++) sum += x[m * K + rest] * one(w + n * K + rest);
            out[m * N + n] = sum;
        }
}

template <typename W, int NT>
static inline void rows(const float* x, const W* w, float* out, int64_t M, int64_t N, int64_t K) {
    int64_t m = 0;
    for (; m + 8 <= M; m += 8) tile<W, NT, 8>(x + m * K, w, out + m * N, N, K);
    for (; m + 4 <= M; m += 4) tile<W, NT, 4>(x + m * K, w, out + m * N, N, K);
    for (; m + 2 <= M; m += 2) tile<W, NT, 2>(x + m * K, w, out + m * N, N, K);
    for (; m < M; m++) tile<W, NT, 1>(x + m * K, w, out + m * N, N, K);
}

template <typename W>
static void product(const float* x, const W* w, float* out, int64_t M, int64_t N, int64_t K, int64_t threads) {
    constexpr int NT = 3;
    int64_t blocks = N / NT;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        rows<W, NT>(x, w + block * NT * K, out + block * NT, M, N, K);
    for (int64_t n = blocks * NT; n < N; n++) rows<W, 1>(x, w + n * K, out + n, M, N, K);
}

extern "C" void kernel(const float* x, const void* w, float* out, int64_t M, int64_t N, int64_t K,
                       int64_t bfloat16, int64_t threads) {
    if (bfloat16) product(x, (const uint16_t*)w, out, M, N, K, threads);
    else product(x, (const float*)w, out, M, N, K, threads);
}
"""


@functools.lru_cache(maxsize=1)
def _kernel() -> Callable | None:
    """The compiled kernel, built once per machine by inductor's own C++ build and cache; None where that fails."""
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        return CppPythonBindingsCodeCache.load_pybinding(
            ["const float*", "const void*", "float*"] + ["int64_t"] * 5, _SOURCE
        )
    except Exception as error:  # no compiler, or another release's build: BLAS does it, more slowly
        _LOG.warning("no own matrix product on this machine, BLAS is used: %s", error)
        return None


def replace_linears(graph: fx.GraphModule) -> None:
    """Exchange the graph's linear layers on a CPU for products that read the weights at full bandwidth.

    A single row becomes a sum that inductor fuses with its neighbours; more rows, whose number may vary, go to
    `kvpatch::linears`, all products of one input in one call. Mutates the graph.
    """
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        source, weight = node.args[:2]
        example = weight.meta["example_value"]
        known = weight.op in ("placeholder", "get_attr")  # not one that is computed between the products
        known = known and not is_traceable_wrapper_subclass(example)  # such as quantised weights
        if known and example.device.type == "cpu" and example.dtype in (torch.float32, torch.bfloat16):
            groups.setdefault(source, []).append(node)
    for source, nodes in groups.items():
        rows = source.meta["example_value"].shape[:-1]
        if all(isinstance(size, int) and size == 1 for size in rows):
            for node in nodes:
                node.target = one_row
        elif _kernel() is not None:
            _group(graph.graph, [node for node in nodes if len(node.args) < 3 or node.args[2] is None])
    graph.recompile()


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of x [..., K] with a single row, for inductor to make a loop of: [..., N]."""
    accumulated = torch.promote_types(x.dtype, torch.float32)
    output = (x.reshape(-1).to(accumulated) * weight.to(accumulated)).sum(-1)
    if bias is not None:
        output = output + bias
    return output.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _group(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    if not nodes:
        return
    _define()
    source = nodes[0].args[0]  # looked up here: it may have been exchanged itself meanwhile
    with graph.inserting_before(nodes[0]):
        together = graph.call_function(torch.ops.kvpatch.linears.default, (source, [node.args[1] for node in nodes]))
        for index, node in enumerate(nodes):
            one = graph.call_function(operator.getitem, (together, index))
            one.meta = node.meta
            node.replace_all_uses_with(one)
    for node in nodes:
        graph.erase_node(node)


@functools.lru_cache(maxsize=1)
def _define() -> torch.library.Library:
    """Define ``kvpatch::linears(x, weights) -> Tensor[]``; not at import, which has no side effects."""
    library = torch.library.Library("kvpatch", "DEF")
    library.define("linears(Tensor x, Tensor[] weights) -> Tensor[]")
    library.impl("linears", _linears, "CPU")
    torch.library.register_fake("kvpatch::linears", _linears_shape, lib=library)
    return library


def _linears_shape(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def _linears(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    width = x.shape[-1]
    rows = x.numel() // width
    kernel = _kernel()
    if rows > MOST_ROWS:
        return [linear(x, weight) for weight in weights]
    inputs = x.float().contiguous()
    threads = torch.get_num_threads()
    outputs = []
    for weight in weights:
        if not weight.is_contiguous():
            outputs.append(linear(x, weight))
            continue
        # Not torch.empty: the kernel writes float32 here, whatever the process's default dtype and device are.
        output = inputs.new_empty(*x.shape[:-1], weight.shape[0])
        kernel(inputs, weight, output, rows, weight.shape[0], width, weight.dtype == torch.bfloat16, threads)
        outputs.append(output.to(x.dtype))
    return outputs
