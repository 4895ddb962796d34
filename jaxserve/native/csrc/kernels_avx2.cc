// The kernels for x86-64 CPUs with AVX2 and FMA.
#include "pool.h"
#include "types.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>

namespace jaxserve {
namespace {
bool avx2_runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
}  // namespace

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
namespace {
#include "vec_avx2.h"
#include "tile.h"
#include "sums.h"
#include "linear_kernel.h"
#include "fixed_kernel.h"
#include "packed_kernel.h"
#include "attention_kernel.h"
#include "gate_kernel.h"
}  // namespace
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Kernels kAvx2Kernels = {
    "avx2",
    avx2_runs_here,
    avx2::linear,
    avx2::kTileCols,
    avx2::kGroup,
    2,
    false,
    avx2::pack,
    avx2::linear_packed,
    avx2::pack_fixed,
    avx2::linear_fixed,
    avx2::paged_attention,
    avx2::gate,
};
}  // namespace jaxserve

#else

namespace jaxserve {
const Kernels kAvx2Kernels = {"avx2", [] { return false; }};
}  // namespace jaxserve
#endif
