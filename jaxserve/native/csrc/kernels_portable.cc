// The kernels in plain C++, for every CPU.
#include "pool.h"
#include "types.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace jaxserve {
namespace portable {
namespace {
#include "vec_portable.h"
#include "tile.h"
#include "sums.h"
#include "linear_kernel.h"
#include "fixed_kernel.h"
#include "packed_kernel.h"
#include "attention_kernel.h"
#include "gate_kernel.h"
}  // namespace
}  // namespace portable

const Kernels kPortableKernels = {
    "portable",
    [] { return true; },
    portable::linear,
    portable::kTileCols,
    portable::kGroup,
    2,
    false,
    portable::pack,
    portable::linear_packed,
    portable::pack_fixed,
    portable::linear_fixed,
    portable::paged_attention,
    portable::gate,
};
}  // namespace jaxserve
