// Eight float lanes on AVX2 and FMA. Included inside a namespace, under a target("avx2,fma") region.

constexpr int kLanes = 8;
constexpr int kTileVectors = 2;  // of a register tile
constexpr int kPairs = kLanes;   // of elements, that store_pairs_transposed() takes of each row

using vf = __m256;
using vi = __m256i;

inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }

// a where x >= limit, 0 elsewhere (also where x is NaN).
inline vf keep_if_ge(vf a, vf x, vf limit) {
  return _mm256_and_ps(a, _mm256_cmp_ps(x, limit, _CMP_GE_OQ));
}
inline vf round_nearest(vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n in [-126, 127].
inline vf scale_by_power_of_two(vf x, vf n) {
  const vi bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}

// Half of 2 * kLanes elements: of bfloat16 the even (0) or the odd ones (1), of floats the first or the last.
inline vf load_half(const bf16* p, int half) {
  const vi v = _mm256_loadu_si256(reinterpret_cast<const vi*>(p));
  if (half == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline vf load_half(const float* p, int half) { return _mm256_loadu_ps(p + half * kLanes); }

// kLanes elements in their order.
inline vf load_row(const bf16* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
inline vf load_row(const float* p) { return _mm256_loadu_ps(p); }
inline vf load_row(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// The bits of from_float(v, bf16*), each in a lane of 32.
inline vi rounded(vf v) {
  const vi bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
  const vi odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const vi near = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const vi nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(near, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
// kLanes values as bfloat16.
inline void store_rounded(bf16* p, vf v) {
  const vi bits = rounded(v);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

// Floats [0, 4) of `row(0)` and `row(1)`.
template <typename Row>
inline vf load_quads(const Row& row) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row(0))), _mm_loadu_ps(row(1)), 1);
}
inline vf unpack_low(vf a, vf b) { return _mm256_unpacklo_ps(a, b); }
inline vf unpack_high(vf a, vf b) { return _mm256_unpackhi_ps(a, b); }
inline vf first_pairs(vf a, vf b) { return _mm256_shuffle_ps(a, b, 0x44); }  // of each four
inline vf last_pairs(vf a, vf b) { return _mm256_shuffle_ps(a, b, 0xee); }
// Of pairs of bfloat16 that lie in floats.
inline vf even_half(vf v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16)); }
inline vf odd_half(vf v) {
  return _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
#include "transposed.h"

// total + lane 0 + lane 1 + ... of kLanes vectors that lie one after the other at `p`.
inline vf add_lanes_in_order(vf total, const float* p) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    vf r[4];
    load_transposed_4([=](int i) { return p + i * kLanes + 4 * half; }, r);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) total = add(total, r[j]);
  }
  return total;
}

// The larger of each lane; NaN where either is one.
inline vf max_or_nan(vf a, vf b) {
  return _mm256_or_ps(_mm256_max_ps(a, b), _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
inline vf to_floats(vi v) { return _mm256_cvtepi32_ps(v); }
// kLanes pairs of 16-bit integers.
inline vi load_pairs(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const vi*>(p)); }
// kLanes pairs of 8-bit integers, as 16-bit ones.
inline vi load_pairs(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// What load_pairs(const int16_t*) reads again.
inline void store_pairs(int16_t* p, vi v) { _mm256_storeu_si256(reinterpret_cast<vi*>(p), v); }
// kLanes values, rounded to 16-bit integers.
inline void store_fixed(int16_t* p, vf v) {
  const vi whole = _mm256_cvtps_epi32(v);
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
// Sums of a channel that fixed_tile() keeps side by side: more than one where they would wait for each other.
constexpr int fixed_chains(int) { return 1; }
constexpr int kFixedRows = 6;  // of a tile
inline vi add_whole(vi a, vi b) { return _mm256_add_epi32(a, b); }
// a += the pair at x, multiplied and added, times each pair of b. In assembly, since GCC moves the loads of several
// rows ahead of their use, and then has no registers left for the sums.
inline void add_pairs(const int32_t* x, const vi (&b)[kTileVectors], vi (&a)[kTileVectors]) {
  vi both, first;
  asm("vpbroadcastd %[x], %[both]\n\t"
      "vpmaddwd %[b0], %[both], %[first]\n\t"
      "vpaddd %[first], %[a0], %[a0]\n\t"
      "vpmaddwd %[b1], %[both], %[both]\n\t"
      "vpaddd %[both], %[a1], %[a1]"
      : [a0] "+x"(a[0]), [a1] "+x"(a[1]), [both] "=&x"(both), [first] "=&x"(first)
      : [b0] "x"(b[0]), [b1] "x"(b[1]), [x] "m"(*x));
}
