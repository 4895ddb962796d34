// Runs numbered chunks of work on XLA's intra-op threads and on the calling one.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <thread>

namespace jaxserve {

// A thread pool that may start a scheduled task late or, while every thread is busy, after the caller
// has finished. So the caller takes chunks as well, and waits only for chunks that a thread has begun.
class Pool {
 public:
  using Schedule = std::function<void(std::function<void()>)>;

  Pool(int num_threads, Schedule schedule) : num_threads_(num_threads), schedule_(std::move(schedule)) {}

  int num_threads() const { return num_threads_; }

  // Calls body(i) once for each i in [0, chunks) and returns when all calls have returned.
  template <typename Body>
  void parallel_for(int64_t chunks, const Body& body) {
    const int64_t helpers = num_threads_ - 1 < chunks - 1 ? num_threads_ - 1 : chunks - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < chunks; ++i) body(i);
      return;
    }
    struct Shared {
      std::atomic<int64_t> next{0};
      std::atomic<int64_t> done{0};
    };
    // Owned by every task: one that starts late finds no chunk left and never touches `body`.
    auto shared = std::make_shared<Shared>();
    const Body* call = &body;
    auto work = [shared, call, chunks] {
      int64_t finished = 0;
      for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < chunks; ++finished) (*call)(i);
      if (finished != 0) shared->done.fetch_add(finished, std::memory_order_release);
    };
    for (int64_t i = 0; i < helpers; ++i) schedule_(work);
    work();
    for (int spins = 0; shared->done.load(std::memory_order_acquire) < chunks; ++spins) {
      if (spins > 2000) std::this_thread::yield();
    }
  }

 private:
  int num_threads_;
  Schedule schedule_;
};

// Scratch memory that a thread keeps between calls. `Tag` tells buffers that live at the same time apart.
template <typename Tag>
float* thread_scratch(size_t floats) {
  struct Buffer {
    float* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < floats) {
    std::free(buffer.data);
    buffer.size = 0;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.size = floats;
  }
  return buffer.data;
}

}  // namespace jaxserve
