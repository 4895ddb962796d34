// Element types, and the arguments of the kernels as plain pointers and sizes.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jaxserve {

struct bf16 {
  uint16_t bits;
};

inline float float_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline float to_float(bf16 x) { return float_from_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline void from_float(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}
inline void from_float(float x, float* out) { *out = x; }

enum class Dtype { kFloat32, kBfloat16, kInt16, kInt8 };

// Elements of a row of x that share a scale against packed int16 or int8 weights.
constexpr int64_t kFixedGroup = 64;
// Whether the elements of an int8 channel of k may share scales in groups of so many.
inline bool fixed_group(int64_t group, int64_t k) {
  return group > 0 && k % group == 0 && (group == k || group == kFixedGroup / 2 || group % kFixedGroup == 0);
}

// y[m, n] = sum_k x[m, k] * w[n, k]
struct LinearArgs {
  int64_t m, n, k;
  int64_t group;  // elements of a channel of packed int16 or int8 weights that share a scale
  Dtype x_dtype, w_dtype, y_dtype;
  const void* x;
  const void* w;
  void* y;
};

// out: w in the order that the packed kernel reads. w and out: [rows, k], all layers' output channels; out of
// bfloat16 is [rows, k + 2] of int16, that of int8 [rows, k + 4 * k / group] of int8.
struct PackArgs {
  int64_t rows, k;
  Dtype dtype;
  const void* w;
  const float* scales;  // of int8: [rows, k / group]
  int64_t group;
  void* out;
};

constexpr int64_t kInt8ScaleBytes = 4;  // a float behind the values of a head in an int8 pool

struct AttentionArgs {
  int64_t batch, queries, heads, kv_heads, head_dim;  // q and out: [batch, queries, heads, head_dim]
  // k_pages, v_pages: [slots, kv_heads, head_dim], or of int8 [slots, kv_heads, head_dim + kInt8ScaleBytes]: a
  // head's values and their scale.
  int64_t slots;
  int64_t table_width;                                // page_table: [batch, table_width]
  int64_t page_size;
  int64_t window;  // 0: every earlier key
  float scale;
  float soft_cap;  // 0: none
  Dtype q_dtype, kv_dtype;
  const void* q;
  const void* k_pages;
  const void* v_pages;
  const float* sinks;  // [heads], of each head one more score, whose value is 0; or null
  const int32_t* page_table;
  const int32_t* context_lens;
  const int32_t* query_lens;
  void* out;
};

enum class Activation { kSilu, kGeluTanh };

// x: [m, 2 * width], out: [m, width].
struct GateArgs {
  int64_t m, width;
  Activation activation;
  Dtype dtype;
  const void* x;
  void* out;
};

class Pool;

// One set of kernels, compiled for one instruction set.
struct Kernels {
  const char* name;
  bool (*runs_here)();
  void (*linear)(const LinearArgs&, Pool&);
  int64_t panel_rows, panel_group;  // a matrix can be packed if its n and k are multiples of these
  int int8_side;                    // elements of a channel of packed int8 that lie side by side
  bool keeps_bf16;                  // packed bfloat16 stays such, without a scale
  void (*pack)(const PackArgs&, Pool&);  // of float32
  void (*linear_packed)(const LinearArgs&, Pool&);
  void (*pack_fixed)(const PackArgs&, Pool&);  // of bfloat16 and int8
  void (*linear_fixed)(const LinearArgs&, Pool&);
  void (*paged_attention)(const AttentionArgs&, Pool&);
  void (*gate)(const GateArgs&, Pool&);
};

extern const Kernels kAmxKernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kPortableKernels;

}  // namespace jaxserve
