// The gated activation of a feed-forward block: out[m, i] = f(x[m, i]) * x[m, width + i], in float32. Included
// after attention_kernel.h, for its exponential.

constexpr int64_t kThreadedGate = 20000;  // elements of out from which threads share in the work

// 1 / (1 + e^-z), without overflow.
inline vf sigmoid(vf z) {
  const vf zeros = zero(), ones = set1(1.0f);
  const vf size = max(z, sub(zeros, z));
  const vf e = exp_nonpositive(sub(zeros, size));
  const vf large = div(ones, add(ones, e)), small = mul(e, large);
  // `large` where z >= 0, `small` elsewhere; z that is not a number stays one in the product with x.
  return add(keep_if_ge(sub(large, small), z, zeros), small);
}

inline vf activated(vf x, Activation activation) {
  if (activation == Activation::kSilu) return mul(x, sigmoid(x));
  // 0.5 x (1 + tanh u) = x sigmoid(2 u). Source: Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2.
  const vf cubic = mul(mul(mul(x, x), x), set1(0.044715f));
  return mul(x, sigmoid(mul(add(x, cubic), set1(1.5957691216057308f))));
}

template <typename X, typename Y>
void gate_row(const X* x, int64_t width, Activation activation, Y* out) {
  const X* up = x + width;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const vf value = mul(activated(load_row(x + i), activation), load_row(up + i));
    if constexpr (sizeof(Y) == 2) {
      store_rounded(out + i, value);
    } else {
      store(out + i, value);
    }
  }
  for (; i < width; ++i) {
    float values[kLanes];
    store(values, mul(activated(set1(to_float(x[i])), activation), set1(to_float(up[i]))));
    from_float(values[0], out + i);
  }
}

void gate(const GateArgs& args, Pool& pool) {
  const auto row = [&args](int64_t m) {
    const auto run = [&](const auto* x, auto* out) {
      gate_row(x + m * 2 * args.width, args.width, args.activation, out + m * args.width);
    };
    if (args.dtype == Dtype::kBfloat16) {
      run(static_cast<const bf16*>(args.x), static_cast<bf16*>(args.out));
    } else {
      run(static_cast<const float*>(args.x), static_cast<float*>(args.out));
    }
  };
  if (args.m * args.width < kThreadedGate) {
    for (int64_t m = 0; m < args.m; ++m) row(m);
  } else {
    pool.parallel_for(args.m, row);
  }
}
