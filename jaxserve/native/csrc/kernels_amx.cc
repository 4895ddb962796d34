// The kernels for x86-64 CPUs with AMX, under Linux: linear layers of packed bfloat16 and int8 weights. Everything else
// is AVX-512's.
#include "pool.h"
#include "types.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace jaxserve {
namespace {
// Asks Linux for the tile registers, which it gives to a whole process.
// Source: Documentation/arch/x86/xstate.rst of the kernel.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
bool amx_runs_here() {
  static const bool runs = kAvx512Kernels.runs_here() && __builtin_cpu_supports("amx-tile") &&
                           __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") && may_use_tiles();
  return runs;
}
}  // namespace

#if defined(__clang__)
#pragma clang attribute push(                                                                                   \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,amx-tile,amx-int8,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,amx-tile,amx-int8,amx-bf16")
#endif
namespace amx {
namespace {
#include "vec_avx512.h"
#include "tile.h"
#include "sums.h"
#include "fixed_kernel.h"
#include "amx_kernel.h"
}  // namespace
}  // namespace amx
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Kernels kAmxKernels = {
    "amx",
    amx_runs_here,
    [](const LinearArgs& args, Pool& pool) { kAvx512Kernels.linear(args, pool); },
    amx::kTileCols,
    16,
    4,
    true,
    [](const PackArgs& args, Pool& pool) { kAvx512Kernels.pack(args, pool); },
    [](const LinearArgs& args, Pool& pool) { kAvx512Kernels.linear_packed(args, pool); },
    amx::pack_amx,
    amx::linear_amx,
    [](const AttentionArgs& args, Pool& pool) { kAvx512Kernels.paged_attention(args, pool); },
    [](const GateArgs& args, Pool& pool) { kAvx512Kernels.gate(args, pool); },
};
}  // namespace jaxserve

#else

namespace jaxserve {
const Kernels kAmxKernels = {"amx", [] { return false; }};
}  // namespace jaxserve
#endif
