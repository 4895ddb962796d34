// Sixteen float lanes on AVX-512 with VNNI. Included inside a namespace, under a target() region that has them.
// The functions are those of vec_avx2.h that the kernels of sixteen lanes need.

constexpr int kLanes = 16;
constexpr int kTileVectors = 1;
constexpr int kPairs = 8;

using vf = __m512;
using vi = __m512i;

inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

inline vf keep_if_ge(vf a, vf x, vf limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), a);
}
inline vf round_nearest(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf scale_by_power_of_two(vf x, vf n) {
  const vi bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(x, _mm512_castsi512_ps(bits));
}

inline vf load_row(const bf16* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
inline vf load_row(const float* p) { return _mm512_loadu_ps(p); }
inline vf load_row(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// As from_float(v, bf16*) rounds.
inline void store_rounded(bf16* p, vf v) {
  const vi bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
  const vi odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const vi near = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const vi rounded = _mm512_mask_or_epi32(near, nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

// Floats [0, 4) of `row(0)` to `row(3)`.
template <typename Row>
inline vf load_quads(const Row& row) {
  const vf first = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(row(0))), _mm_loadu_ps(row(1)), 1);
  return _mm512_insertf32x4(_mm512_insertf32x4(first, _mm_loadu_ps(row(2)), 2), _mm_loadu_ps(row(3)), 3);
}
inline vf unpack_low(vf a, vf b) { return _mm512_unpacklo_ps(a, b); }
inline vf unpack_high(vf a, vf b) { return _mm512_unpackhi_ps(a, b); }
inline vf first_pairs(vf a, vf b) { return _mm512_shuffle_ps(a, b, 0x44); }
inline vf last_pairs(vf a, vf b) { return _mm512_shuffle_ps(a, b, 0xee); }
inline vf even_half(vf v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16)); }
inline vf odd_half(vf v) {
  return _mm512_and_ps(v, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
#include "transposed.h"

inline vf max_or_nan(vf a, vf b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), _mm512_max_ps(a, b), _mm512_add_ps(a, b));
}
inline vf to_floats(vi v) { return _mm512_cvtepi32_ps(v); }
inline vi load_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
inline vi load_pairs(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_pairs(int16_t* p, vi v) { _mm512_storeu_si512(p, v); }
inline void store_fixed(int16_t* p, vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}
// One sum depends on the one before for 5 cycles, in which two units could add 10.
constexpr int fixed_chains(int rows) { return rows <= 2 ? 4 : rows <= 5 ? 2 : 1; }
constexpr int kFixedRows = 16;
inline vi add_whole(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline void add_pairs(const int32_t* x, const vi (&b)[kTileVectors], vi (&a)[kTileVectors]) {
  asm("vpdpwssd %[x]%{1to16%}, %[b], %[a]" : [a] "+v"(a[0]) : [b] "v"(b[0]), [x] "m"(*x));
}
