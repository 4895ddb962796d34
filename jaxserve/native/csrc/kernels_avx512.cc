// The kernels for x86-64 CPUs with AVX-512 and its VNNI extension. Float linear layers keep eight lanes, on which the
// order of their sums depends; everything else has sixteen.
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
bool avx512_runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
}  // namespace

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
#endif
namespace avx512 {
namespace {
#include "vec_avx512.h"
#include "tile.h"
#include "sums.h"
#include "fixed_kernel.h"
#include "attention_kernel.h"
#include "gate_kernel.h"
}  // namespace
}  // namespace avx512
namespace avx512_floats {
namespace {
#include "vec_avx2.h"
#include "tile.h"
#include "sums.h"
#include "linear_kernel.h"
#include "packed_kernel.h"
}  // namespace
}  // namespace avx512_floats
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static_assert(avx512::kTileCols == avx512_floats::kTileCols, "panels are of one height");
const Kernels kAvx512Kernels = {
    "avx512",
    avx512_runs_here,
    avx512_floats::linear,
    avx512::kTileCols,
    avx512_floats::kGroup,
    2,
    false,
    avx512_floats::pack,
    avx512_floats::linear_packed,
    avx512::pack_fixed,
    avx512::linear_fixed,
    avx512::paged_attention,
    avx512::gate,
};
}  // namespace jaxserve

#else

namespace jaxserve {
const Kernels kAvx512Kernels = {"avx512", [] { return false; }};
}  // namespace jaxserve
#endif
