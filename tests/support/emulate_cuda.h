// Enough of CUDA to run one kernel on a CPU: the threads of a block are fibers of one thread, which
// change at barriers and shuffles only. Shows that the arithmetic and the indices are right; says
// nothing about speed, memory access or races between barriers.
#include <ucontext.h>

#include <cmath>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x, y, z;
};

static Index threadIdx, blockIdx;
static std::vector<float4> dynamic_shared;

namespace emulation {
const int kStack = 1 << 16;

struct Barrier {
  int arrived = 0, round = 0;
};

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> done;
static std::vector<float> slots;
static std::vector<Barrier> warps;
static Barrier block;
static unsigned current;
static std::function<void()> kernel;

inline void wait(Barrier& barrier, int threads) {
  const int round = barrier.round;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.round;
  }
  while (barrier.round == round) swapcontext(&fibers[current], &scheduler);
}

inline void body() {
  kernel();
  done[current] = 1;
}

inline void run_block(unsigned threads) {
  static std::vector<char> stacks;
  stacks.resize(static_cast<size_t>(threads) * kStack);
  fibers.assign(threads, {});
  done.assign(threads, 0);
  slots.assign(threads, 0.0f);
  warps.assign(threads / 32, {});
  block = {};
  for (unsigned t = 0; t < threads; ++t) {
    getcontext(&fibers[t]);
    fibers[t].uc_stack.ss_sp = &stacks[static_cast<size_t>(t) * kStack];
    fibers[t].uc_stack.ss_size = kStack;
    fibers[t].uc_link = &scheduler;
    makecontext(&fibers[t], body, 0);
  }
  for (unsigned left = threads; left > 0;) {
    for (unsigned t = 0; t < threads; ++t) {
      if (done[t]) continue;
      current = t;
      threadIdx = {t, 0, 0};
      swapcontext(&scheduler, &fibers[t]);
      left -= done[t];
    }
  }
}
}  // namespace emulation

inline void __syncthreads() {
  emulation::wait(emulation::block, static_cast<int>(emulation::fibers.size()));
}
inline void __syncwarp() { emulation::wait(emulation::warps[emulation::current / 32], 32); }
inline float __shfl_xor_sync(unsigned, float value, int offset) {
  const unsigned self = emulation::current;
  emulation::slots[self] = value;
  __syncwarp();
  const float other = emulation::slots[self ^ static_cast<unsigned>(offset)];
  __syncwarp();
  return other;
}

// Calls `kernel` in every thread of every block, one block after the other.
inline void launch(Index grid, unsigned threads, size_t shared_bytes, std::function<void()> kernel) {
  emulation::kernel = kernel;
  dynamic_shared.resize(shared_bytes / sizeof(float4) + 1);
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) emulation::run_block(threads);
}
