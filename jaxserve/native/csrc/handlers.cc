// The XLA FFI handlers: check shapes and dtypes, pick the kernels for this CPU, run them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "pool.h"
#include "types.h"
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

const Kernels* const kAllKernels[] = {&kAmxKernels, &kAvx512Kernels, &kAvx2Kernels, &kPortableKernels};  // fastest first

// The kernels in use: the fastest set that this CPU runs, unless jaxserve_use_isa() chose another.
std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{[] {
    const Kernels* const* it = kAllKernels;
    while (!(*it)->runs_here()) ++it;
    return *it;
  }()};
  return kernels;
}
const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool same(ffi::Span<const int64_t> a, ffi::Span<const int64_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}
bool is_float(ffi::DataType dtype) { return dtype == ffi::F32 || dtype == ffi::BF16; }
Dtype dtype_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::BF16: return Dtype::kBfloat16;
    case ffi::S16: return Dtype::kInt16;
    case ffi::S8: return Dtype::kInt8;
    default: return Dtype::kFloat32;
  }
}

template <typename Run>
ffi::Error run_on(ffi::ThreadPool threads, const Run& run) {
  try {
    Pool pool(static_cast<int>(threads.num_threads()),
              [&threads](std::function<void()> task) { threads.Schedule(std::move(task)); });
    run(pool);
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("jaxserve native kernel: ") + error.what());
  }
}

// Asks Linux to keep a buffer in pages of 2 MiB, before it is first written: in pages of 4 KiB each MiB takes 256 page
// faults, and when it is read again and again as many address translations, which a virtual machine pays for twice.
constexpr size_t kHugeOutput = 8 << 20;  // bytes of a result, the logits of many rows: new memory each time
void want_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), first = (begin + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (begin + bytes) / kHuge * kHuge;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

// Where layer `layer` of a stacked buffer begins: [L, ...], its other dimensions holding `elements` in all.
const void* layer_of(const ffi::AnyBuffer& stacked, int32_t layer, int64_t elements) {
  const int64_t bytes = elements * static_cast<int64_t>(ffi::ByteWidth(stacked.element_type()));
  return static_cast<const char*>(stacked.untyped_data()) + layer * bytes;
}

// Whether a matrix [n, k] has the multiples that packing needs.
bool packable(int64_t n, int64_t k) { return n % kernels().panel_rows == 0 && k % kernels().panel_group == 0; }

// The elements of a channel that share a scale, in a packed matrix whose channels take `width` elements of its dtype:
// k of int16 and a float, k of int8 and a float for each group. 0: there is no such matrix.
int64_t packed_group(ffi::DataType dtype, int64_t width, int64_t k) {
  if (dtype == ffi::S16) return width == k + 2 ? k : 0;
  const int64_t scales = (width - k) / 4;
  return scales > 0 && width == k + 4 * scales && k % scales == 0 && fixed_group(k / scales, k) ? k / scales : 0;
}

ffi::Error run_linear(bool packed, ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer w,
                      ffi::Buffer<ffi::S32> layer, ffi::Result<ffi::AnyBuffer> y) {
  const auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  const ffi::DataType w_type = w.element_type();
  const bool fixed = packed && (w_type == ffi::S16 || w_type == ffi::S8);  // with scales
  if (!is_float(x.element_type()) || !(fixed || w_type == ffi::F32 || (!packed && w_type == ffi::BF16)) ||
      !is_float(y->element_type())) {
    return ffi::Error::InvalidArgument(
        "jaxserve linear: dtypes must be float32 or bfloat16, packed weights float32, int16 or int8");
  }
  if (xs.size() != 2 || ws.size() != 3 || ys.size() != 2 || ys[0] != xs[0] || ys[1] != ws[1] ||
      layer.element_count() != 1) {
    return ffi::Error::InvalidArgument("jaxserve linear: shapes must be x [M, K], w [L, N, K], layer [], y [M, N]");
  }
  const int64_t group = fixed ? packed_group(w_type, ws[2], xs[1]) : 0;
  if (fixed ? group == 0 : ws[2] != xs[1]) {
    return ffi::Error::InvalidArgument("jaxserve linear: x has another K than w");
  }
  const int32_t index = layer.typed_data()[0];
  if (index < 0 || index >= ws[0]) {
    return ffi::Error::InvalidArgument("jaxserve linear: layer is out of range");
  }
  if (packed && !packable(ws[1], xs[1])) {
    return ffi::Error::InvalidArgument("jaxserve linear: a matrix of this shape can't be packed");
  }
  LinearArgs args;
  args.m = xs[0];
  args.n = ws[1];
  args.k = xs[1];
  args.group = group;
  args.x_dtype = dtype_of(x.element_type());
  args.w_dtype = dtype_of(w_type);
  args.y_dtype = dtype_of(y->element_type());
  args.x = x.untyped_data();
  args.w = layer_of(w, index, ws[1] * ws[2]);
  args.y = y->untyped_data();
  if (y->size_bytes() >= kHugeOutput) want_huge_pages(args.y, y->size_bytes());
  const auto run = !packed ? kernels().linear : fixed ? kernels().linear_fixed : kernels().linear_packed;
  return run_on(threads, [&](Pool& pool) { run(args, pool); });
}

ffi::Error linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                  ffi::Result<ffi::AnyBuffer> y) {
  return run_linear(false, threads, x, w, layer, y);
}

ffi::Error linear_packed(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                         ffi::Result<ffi::AnyBuffer> y) {
  return run_linear(true, threads, x, w, layer, y);
}

ffi::Error run_pack(ffi::ThreadPool threads, const ffi::AnyBuffer& w, const ffi::AnyBuffer* scales, int64_t group,
                    ffi::Result<ffi::AnyBuffer> out) {
  const auto ws = w.dimensions();
  PackArgs args;
  args.rows = ws[0] * ws[1];
  args.k = ws[2];
  args.dtype = dtype_of(w.element_type());
  args.w = w.untyped_data();
  args.scales = scales == nullptr ? nullptr : static_cast<const float*>(scales->untyped_data());
  args.group = group;
  args.out = out->untyped_data();
  want_huge_pages(args.out, out->size_bytes());
  const auto pack = args.dtype == Dtype::kFloat32 ? kernels().pack : kernels().pack_fixed;
  return run_on(threads, [&](Pool& pool) { pack(args, pool); });
}

ffi::Error pack(ffi::ThreadPool threads, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  const auto ws = w.dimensions(), outs = out->dimensions();
  const bool fixed = w.element_type() == ffi::BF16;
  if (ws.size() != 3 || outs.size() != 3 || outs[0] != ws[0] || outs[1] != ws[1] ||
      outs[2] != ws[2] + (fixed ? 2 : 0) || !packable(ws[1], ws[2])) {
    return ffi::Error::InvalidArgument(
        "jaxserve pack: w must be [L, N, K] of a shape that can be packed, out alike, or [L, N, K + 2] for bfloat16");
  }
  if (!is_float(w.element_type()) || out->element_type() != (fixed ? ffi::S16 : ffi::F32)) {
    return ffi::Error::InvalidArgument("jaxserve pack: w must be float32, out alike, or bfloat16 and out int16");
  }
  return run_pack(threads, w, nullptr, ws[2], out);
}

ffi::Error pack_int8(ffi::ThreadPool threads, ffi::AnyBuffer w, ffi::AnyBuffer scales,
                     ffi::Result<ffi::AnyBuffer> out) {
  const auto ws = w.dimensions(), ss = scales.dimensions(), outs = out->dimensions();
  if (w.element_type() != ffi::S8 || scales.element_type() != ffi::F32 || out->element_type() != ffi::S8) {
    return ffi::Error::InvalidArgument("jaxserve pack_int8: w must be int8, scales float32, out int8");
  }
  if (ws.size() != 3 || ss.size() != 3 || outs.size() != 3 || !same(ws.first(2), ss.first(2)) ||
      !same(ws.first(2), outs.first(2)) || outs[2] != ws[2] + 4 * ss[2] ||
      packed_group(ffi::S8, outs[2], ws[2]) == 0 || !packable(ws[1], ws[2])) {
    return ffi::Error::InvalidArgument(
        "jaxserve pack_int8: w must be [L, N, K] of a shape that can be packed, scales [L, N, K / G], out [L, N, K + "
        "4 K / G]");
  }
  return run_pack(threads, w, &scales, ws[2] / ss[2], out);
}

ffi::Error gate(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, int32_t activation) {
  const auto xs = x.dimensions(), outs = out->dimensions();
  if (xs.size() != 2 || outs.size() != 2 || xs[0] != outs[0] || xs[1] != 2 * outs[1]) {
    return ffi::Error::InvalidArgument("jaxserve gate: shapes must be x [M, 2 I] and out [M, I]");
  }
  if (!is_float(x.element_type()) || out->element_type() != x.element_type()) {
    return ffi::Error::InvalidArgument("jaxserve gate: dtypes must be float32 or bfloat16, and equal");
  }
  if (activation != 0 && activation != 1) return ffi::Error::InvalidArgument("jaxserve gate: unknown activation");
  GateArgs args;
  args.m = outs[0];
  args.width = outs[1];
  args.activation = activation == 0 ? Activation::kSilu : Activation::kGeluTanh;
  args.dtype = dtype_of(x.element_type());
  args.x = x.untyped_data();
  args.out = out->untyped_data();
  return run_on(threads, [&](Pool& pool) { kernels().gate(args, pool); });
}

// A head's values [dim] as int8 and, behind them, their scale. The same as ops/paging.py's `quantise_heads`.
template <typename T>
void quantise_head(const T* from, int64_t dim, char* to) {
  float largest = 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float size = std::fabs(to_float(from[d]));
    largest = size > largest || size != size ? size : largest;
  }
  const float scale = largest / 127.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float q = scale > 0.0f ? to_float(from[d]) / scale : 0.0f;
    to[d] = static_cast<char>(q == q ? static_cast<int8_t>(std::nearbyintf(std::min(127.0f, std::max(-127.0f, q)))) : 0);
  }
  std::memcpy(to + dim, &scale, sizeof scale);
}

// new [M, K, D] to the positions `indices` [M] of layer `layer` of pool [L, slots, K, D], or of int8 with a scale
// [L, slots, K, D + 4], which out takes over. An index outside of the layer is left out.
ffi::Error write_rows(ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer fresh,
                      ffi::Buffer<ffi::S32> indices, ffi::Result<ffi::AnyBuffer> out) {
  const auto ps = pool.dimensions(), fs = fresh.dimensions();
  const bool quantises = pool.element_type() == ffi::S8 && is_float(fresh.element_type());
  if (ps.size() != 4 || fs.size() != 3 || fs[1] != ps[2] || fs[2] != ps[3] - (quantises ? kInt8ScaleBytes : 0) ||
      !same(ps, out->dimensions()) || indices.element_count() != static_cast<size_t>(fs[0]) ||
      layer.element_count() != 1 || !(quantises || fresh.element_type() == pool.element_type()) ||
      out->element_type() != pool.element_type()) {
    return ffi::Error::InvalidArgument(
        "jaxserve write_rows: needs pool [L, slots, K, D], layer [], new [M, K, D] of the same dtype, indices [M]; or "
        "pool [L, slots, K, D + 4] of int8 and new of float32 or bfloat16");
  }
  const int64_t index = layer.typed_data()[0], slots = ps[1];
  if (index < 0 || index >= ps[0]) return ffi::Error::InvalidArgument("jaxserve write_rows: layer is out of range");
  // The caller says that out is the pool; XLA copies first where the old pool is still needed.
  if (out->untyped_data() != pool.untyped_data()) {
    std::memcpy(out->untyped_data(), pool.untyped_data(), pool.size_bytes());
  }
  if (fs[0] == 0) return ffi::Error::Success();
  const int64_t row = ps[2] * ps[3] * static_cast<int64_t>(ffi::ByteWidth(pool.element_type()));
  char* const to = static_cast<char*>(out->untyped_data()) + index * slots * row;
  const char* const from = static_cast<const char*>(fresh.untyped_data());
  const int32_t* const at = indices.typed_data();
  for (int64_t i = 0; i < fs[0]; ++i) {
    if (at[i] < 0 || at[i] >= slots) continue;
    if (!quantises) {
      std::memcpy(to + at[i] * row, from + i * row, row);
      continue;
    }
    for (int64_t head = 0; head < fs[1]; ++head) {
      char* const out = to + at[i] * row + head * ps[3];
      const int64_t first = (i * fs[1] + head) * fs[2];
      if (fresh.element_type() == ffi::BF16) {
        quantise_head(reinterpret_cast<const bf16*>(from) + first, fs[2], out);
      } else {
        quantise_head(reinterpret_cast<const float*>(from) + first, fs[2], out);
      }
    }
  }
  return ffi::Error::Success();
}

ffi::Error zeros(ffi::ThreadPool threads, ffi::Result<ffi::AnyBuffer> out) {
  constexpr int64_t kChunk = 8 << 20;
  const int64_t bytes = static_cast<int64_t>(out->size_bytes());
  char* const data = static_cast<char*>(out->untyped_data());
  want_huge_pages(data, out->size_bytes());
  return run_on(threads, [&](Pool& pool) {
    pool.parallel_for((bytes + kChunk - 1) / kChunk, [&](int64_t i) {
      std::memset(data + i * kChunk, 0, bytes - i * kChunk < kChunk ? bytes - i * kChunk : kChunk);
    });
  });
}

ffi::Error paged_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                           ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> context_lens,
                           ffi::Buffer<ffi::S32> query_lens, ffi::Buffer<ffi::S32> layer,
                           ffi::Buffer<ffi::S32> window, ffi::Buffer<ffi::F32> sinks,
                           ffi::Result<ffi::AnyBuffer> out, int64_t page_size, float scale, float soft_cap) {
  const auto qs = q.dimensions(), ks = k_pages.dimensions(), vs = v_pages.dimensions();
  const auto tables = page_table.dimensions(), outs = out->dimensions();
  const bool is_int8 = k_pages.element_type() == ffi::S8;
  if (qs.size() != 4 || ks.size() != 4 || !same(vs, ks) || layer.element_count() != 1 || window.element_count() != 1 || tables.size() != 2 || !same(outs, qs) || tables[0] != qs[0] ||
      context_lens.element_count() != static_cast<size_t>(qs[0]) ||
      query_lens.element_count() != static_cast<size_t>(qs[0]) || ks[3] != qs[3] + (is_int8 ? kInt8ScaleBytes : 0) ||
      (sinks.element_count() != 0 && sinks.element_count() != static_cast<size_t>(qs[2]))) {
    return ffi::Error::InvalidArgument(
        "jaxserve paged_attention: shapes must be q [B, Q, N, D], pages [L, slots, K, D], of int8 [L, slots, K, D + 4], "
        "page_table [B, P], lens [B], layer [], window [] and sinks [N] or [0]");
  }
  const int32_t index = layer.typed_data()[0];
  if (ks[2] < 1 || qs[2] % ks[2] != 0 || qs[3] % 16 != 0 || qs[3] < 16 || page_size < 1 || ks[1] < page_size ||
      window.typed_data()[0] < 0 || index < 0 || index >= ks[0]) {
    return ffi::Error::InvalidArgument(
        "jaxserve paged_attention: needs N a multiple of K, D of 16, at least one page, window >= 0, a layer in range");
  }
  if (!is_float(q.element_type()) || !(is_int8 || is_float(k_pages.element_type())) ||
      v_pages.element_type() != k_pages.element_type() || out->element_type() != q.element_type()) {
    return ffi::Error::InvalidArgument("jaxserve paged_attention: dtypes must be float32 or bfloat16, pages int8 too");
  }
  AttentionArgs args;
  args.batch = qs[0];
  args.queries = qs[1];
  args.heads = qs[2];
  args.head_dim = qs[3];
  args.slots = ks[1];
  args.kv_heads = ks[2];
  args.table_width = tables[1];
  args.page_size = page_size;
  args.window = window.typed_data()[0];
  args.scale = scale;
  args.soft_cap = soft_cap;
  args.q_dtype = dtype_of(q.element_type());
  args.kv_dtype = dtype_of(k_pages.element_type());
  args.q = q.untyped_data();
  args.k_pages = layer_of(k_pages, index, ks[1] * ks[2] * ks[3]);
  args.v_pages = layer_of(v_pages, index, ks[1] * ks[2] * ks[3]);
  args.page_table = page_table.typed_data();
  args.context_lens = context_lens.typed_data();
  args.query_lens = query_lens.typed_data();
  args.sinks = sinks.element_count() == 0 ? nullptr : sinks.typed_data();
  args.out = out->untyped_data();
  return run_on(threads, [&](Pool& pool) { kernels().paged_attention(args, pool); });
}

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_EXPORT extern "C" __attribute__((visibility("default")))

XLA_FFI_DEFINE_HANDLER(kLinear, jaxserve::linear,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kLinearPacked, jaxserve::linear_packed,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kPack, jaxserve::pack,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kPackInt8, jaxserve::pack_int8,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kGate, jaxserve::gate,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int32_t>("activation"));

XLA_FFI_DEFINE_HANDLER(kWriteRows, jaxserve::write_rows,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kZeros, jaxserve::zeros, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kPagedAttention, jaxserve::paged_attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("page_size")
                           .Attr<float>("scale")
                           .Attr<float>("soft_cap"));

JAXSERVE_EXPORT XLA_FFI_Error* jaxserve_linear(XLA_FFI_CallFrame* frame) { return kLinear(frame); }
JAXSERVE_EXPORT XLA_FFI_Error* jaxserve_linear_packed(XLA_FFI_CallFrame* frame) { return kLinearPacked(frame); }
JAXSERVE_EXPORT XLA_FFI_Error* jaxserve_pack(XLA_FFI_CallFrame* frame) { return kPack(frame); }
JAXSERVE_EXPORT XLA_FFI_Error* jaxserve_pack_int8(XLA_FFI_CallFrame* frame) { return kPackInt8(frame); }
JAXSERVE_EXPORT XLA_FFI_Error* jaxserve_gate(XLA_FFI_CallFrame* frame) { return kGate(frame); }
JAXSERVE_EXPORT XLA_FFI_Error* jaxserve_write_rows(XLA_FFI_CallFrame* frame) { return kWriteRows(frame); }
JAXSERVE_EXPORT XLA_FFI_Error* jaxserve_zeros(XLA_FFI_CallFrame* frame) { return kZeros(frame); }
JAXSERVE_EXPORT XLA_FFI_Error* jaxserve_paged_attention(XLA_FFI_CallFrame* frame) { return kPagedAttention(frame); }
// The version of the FFI headers that this library was built with.
JAXSERVE_EXPORT int jaxserve_ffi_major() { return XLA_FFI_API_MAJOR; }
JAXSERVE_EXPORT int jaxserve_ffi_minor() { return XLA_FFI_API_MINOR; }
// Channels of a panel of packed weights, for the kernels in use.
JAXSERVE_EXPORT int jaxserve_panel_rows() { return static_cast<int>(jaxserve::kernels().panel_rows); }
// Elements of a channel that lie side by side in packed int8 weights, and whether packed bfloat16 ones stay such.
JAXSERVE_EXPORT int jaxserve_int8_side() { return jaxserve::kernels().int8_side; }
JAXSERVE_EXPORT int jaxserve_keeps_bf16() { return jaxserve::kernels().keeps_bf16; }
// The instruction set of the kernels in use, and the choice of another: 0 when this CPU can't run it.
JAXSERVE_EXPORT const char* jaxserve_isa() { return jaxserve::kernels().name; }
// The name of the i-th fastest set of kernels that this CPU runs, or null.
JAXSERVE_EXPORT const char* jaxserve_isa_that_runs(int i) {
  for (const jaxserve::Kernels* kernels : jaxserve::kAllKernels) {
    if (kernels->runs_here() && i-- == 0) return kernels->name;
  }
  return nullptr;
}
JAXSERVE_EXPORT int jaxserve_use_isa(const char* name) {
  for (const jaxserve::Kernels* kernels : jaxserve::kAllKernels) {
    if (std::strcmp(kernels->name, name) == 0 && kernels->runs_here()) {
      jaxserve::chosen().store(kernels, std::memory_order_relaxed);
      return 1;
    }
  }
  return 0;
}
