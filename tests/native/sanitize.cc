// Runs every kernel of every instruction set that this CPU has over edge shapes, on buffers of exactly their size and
// on more threads than chunks at times. It compares nothing: scripts/sanitize_kernels builds it with sanitizers, and
// they judge.
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "pool.h"
#include "types.h"

namespace {
using namespace jaxserve;

constexpr int kThreads = 4;

// Threads that take tasks in order, as XLA's do; those still waiting when a kernel returns start late.
class Threads {
 public:
  Threads() {
    for (int i = 0; i < kThreads - 1; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Threads() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void schedule(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

std::mt19937 random_bits(0);

int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kInt8 ? 1 : 2;
}

// Numbers near 1 of either sign.
std::vector<char> values(int64_t count, Dtype dtype) {
  std::vector<char> bytes(count * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(random_bits() % 2001) / 1000.0f - 1.0f;
    if (dtype == Dtype::kFloat32) {
      std::memcpy(&bytes[4 * i], &value, 4);
    } else if (dtype == Dtype::kBfloat16) {
      bf16 rounded;
      from_float(value, &rounded);
      std::memcpy(&bytes[2 * i], &rounded, 2);
    } else {
      bytes[i] = static_cast<char>(random_bits());
    }
  }
  return bytes;
}

void run_linear(const Kernels& kernels, Pool& pool, int64_t m, int64_t n, int64_t k, Dtype w_dtype, Dtype x_dtype,
                bool packed, int64_t group) {
  const std::vector<char> x = values(m * k, x_dtype), w = values(n * k, w_dtype);
  std::vector<char> y(m * n * size_of(x_dtype)), in_order;
  const std::vector<float> scales(group == 0 ? 0 : n * k / group, 0.5f);
  LinearArgs args = {m, n, k, group, x_dtype, w_dtype, x_dtype, x.data(), w.data(), y.data()};
  if (packed) {
    const bool fixed = w_dtype == Dtype::kBfloat16;
    in_order.resize(n * (fixed ? 2 * k + 4 : k * size_of(w_dtype) + (group == 0 ? 0 : 4 * k / group)));
    const auto pack = w_dtype == Dtype::kFloat32 ? kernels.pack : kernels.pack_fixed;
    pack({n, k, w_dtype, w.data(), scales.data(), group, in_order.data()}, pool);
    args.w = in_order.data();
    if (fixed) args.w_dtype = Dtype::kInt16, args.group = k;
  }
  (!packed ? kernels.linear : w_dtype == Dtype::kFloat32 ? kernels.linear_packed : kernels.linear_fixed)(args, pool);
}

void run_linears(const Kernels& kernels, Pool& pool) {
  const Dtype floats[] = {Dtype::kFloat32, Dtype::kBfloat16};
  for (const Dtype x_dtype : floats) {
    for (const Dtype w_dtype : floats) {
      for (const int64_t m : {0, 1, 2, 3, 5, 16, 17, 40}) {
        for (const int64_t k : {1, 16, 33, 2051}) {
          for (const int64_t n : {1, 11, 48}) run_linear(kernels, pool, m, n, k, w_dtype, x_dtype, false, 0);
        }
      }
      run_linear(kernels, pool, 519, 11, 33, w_dtype, x_dtype, false, 0);  // two passes
    }
    const int64_t row = kernels.panel_rows, step = kernels.panel_group;
    for (const Dtype w_dtype : {Dtype::kBfloat16, Dtype::kInt8}) {  // two passes
      run_linear(kernels, pool, 49, row, 43776, w_dtype, x_dtype, true, 43776);
    }
    for (const int64_t m : {0, 1, 2, 5, 7, 13, 24, 25, 61}) {
      for (const int64_t k : {step, 3 * step, 1024 + step}) {
        for (const int64_t n : {row, 5 * row}) {
          for (const Dtype w_dtype : floats) run_linear(kernels, pool, m, n, k, w_dtype, x_dtype, true, 0);
          run_linear(kernels, pool, m, n, k, Dtype::kInt8, x_dtype, true, k);
        }
      }
      for (const int64_t group : {32, 64, 192}) {
        run_linear(kernels, pool, m, 3 * row, 384, Dtype::kInt8, x_dtype, true, group);
      }
    }
  }
}

void run_gates(const Kernels& kernels, Pool& pool) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16}) {
    for (const int64_t m : {0, 1, 400}) {
      for (const int64_t width : {1, 15, 16, 333}) {
        const std::vector<char> x = values(m * 2 * width, dtype);
        std::vector<char> out(m * width * size_of(dtype));
        for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
          kernels.gate({m, width, activation, dtype, x.data(), out.data()}, pool);
        }
      }
    }
  }
}

// Rows of several lengths, an empty one among them, whose page tables end in numbers of no page.
void run_attention(const Kernels& kernels, Pool& pool, Dtype q_dtype, Dtype kv_dtype, int64_t queries, int64_t dim,
                   int64_t page_size, int64_t window, float soft_cap) {
  const int64_t heads = 6, kv_heads = 2, pages = 24;
  const std::vector<int32_t> contexts = {1, 0, 17, 5 * static_cast<int32_t>(page_size)};
  const int64_t batch = contexts.size(), width = 6;
  std::vector<int32_t> table(batch * width, 1 << 30), query_lens(batch);
  int32_t page = 0;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i * page_size < contexts[b]; ++i) table[b * width + i] = (page++ * 7) % pages;
    query_lens[b] = static_cast<int32_t>(contexts[b] < queries ? contexts[b] : queries);
  }
  const int64_t row = dim + (kv_dtype == Dtype::kInt8 ? kInt8ScaleBytes : 0);
  const int64_t elements = pages * page_size * kv_heads * row, count = batch * queries * heads * dim;
  const std::vector<char> q = values(count, q_dtype), k = values(elements, kv_dtype), v = values(elements, kv_dtype);
  const std::vector<float> sinks(heads, 0.5f);
  std::vector<char> out(count * size_of(q_dtype));
  AttentionArgs args = {};
  args.batch = batch;
  args.queries = queries;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.head_dim = dim;
  args.slots = pages * page_size;
  args.table_width = width;
  args.page_size = page_size;
  args.window = window;
  args.scale = 0.125f;
  args.soft_cap = soft_cap;
  args.q_dtype = q_dtype;
  args.kv_dtype = kv_dtype;
  args.sinks = window == 0 ? nullptr : sinks.data();
  args.q = q.data();
  args.k_pages = k.data();
  args.v_pages = v.data();
  args.page_table = table.data();
  args.context_lens = contexts.data();
  args.query_lens = query_lens.data();
  args.out = out.data();
  kernels.paged_attention(args, pool);
}

void run_attentions(const Kernels& kernels, Pool& pool) {
  for (const Dtype q_dtype : {Dtype::kFloat32, Dtype::kBfloat16}) {
    for (const Dtype kv_dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kInt8}) {
      for (const int64_t queries : {1, 2, 9}) {
        for (const int64_t dim : {16, 48, 256}) {
          for (const int64_t page_size : {4, 16}) {
            run_attention(kernels, pool, q_dtype, kv_dtype, queries, dim, page_size, 0, 0.0f);
            run_attention(kernels, pool, q_dtype, kv_dtype, queries, dim, page_size, 7, 20.0f);
          }
        }
      }
    }
  }
}
}  // namespace

int main() {
  Threads threads;
  for (const Kernels* kernels : {KERNELS}) {
    if (!kernels->runs_here()) continue;
    for (const int count : {1, kThreads}) {
      Pool pool(count, [&threads](std::function<void()> task) { threads.schedule(std::move(task)); });
      run_linears(*kernels, pool);
      run_gates(*kernels, pool);
      run_attentions(*kernels, pool);
    }
    std::printf("%s: done\n", kernels->name);
    std::fflush(stdout);
  }
}
