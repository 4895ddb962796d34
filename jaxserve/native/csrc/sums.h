// What the linear kernels share. Included inside a namespace, after vec_*.h.

constexpr int64_t kThreadedUnpack = 100000;  // elements of x from which threads share in unpacking it
constexpr int64_t kChunksPerThread = 8;      // at least, so that threads finish together

struct XTag {};
struct SumTag {};

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Channels [col, col + cols) of a row of y.
inline void write_sums(const LinearArgs& args, int64_t row, int64_t col, int64_t cols, const float* sums) {
  if (args.y_dtype == Dtype::kFloat32) {
    std::memcpy(static_cast<float*>(args.y) + row * args.n + col, sums, cols * sizeof(float));
    return;
  }
  bf16* y = static_cast<bf16*>(args.y) + row * args.n + col;
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes) store_rounded(y + c, load(sums + c));
  for (; c < cols; ++c) from_float(sums[c], y + c);
}
