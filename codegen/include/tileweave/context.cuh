// What the runtime tells every kernel, and what a kernel tells the runtime before it gives up.
// The layouts are read and written by runtime/host/context.py: change both. They also compile for
// the host, where tests/runtime/test_context.py compares them.
#pragma once
#include <stdint.h>

namespace tw {

// In pinned host memory, one a process. `state` is 0 until a thread claims it, 1 while that thread
// fills it in, 2 when it can be read.
struct Record {
  uint32_t state;
  int32_t loc;
  int32_t rank;
  int32_t peer;
  uint64_t flag;
  uint64_t expected;
  uint64_t seen;
  uint32_t block[3];
  uint32_t thread;
};

// In device memory, one a process.
struct Context {
  uint64_t timeout_ns; // 0: wait for ever
  int32_t rank;
  int32_t world_size;
  uint64_t barrier;     // address of this rank's barrier words
  uint64_t heap_stride; // bytes from one rank's heap to the next
  Record *record;
};

#ifdef __CUDACC__

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Ends the grid after a while. Not in give_up, which warps with different numbers of registers
// (setmaxnreg) call: ptxas finds none (C7600) for a function with a loop that both of them call.
__device__ __noinline__ inline void trap_after(uint64_t linger_ns) {
  for (uint64_t start = now_ns(); now_ns() - start < linger_ns;) {
    __nanosleep(10000);
  }
  asm volatile("trap;");
}

// Leaves the record for the host and ends the grid. One thread of the process's device speaks; the
// others stand still, because a trap of theirs would end the grid before the record is out. A
// thread that finds the record taken but nobody trapping (a former kernel's record) traps after a
// while itself. No printf: it would make ptxas serialise wgmma in the whole kernel.
__device__ __noinline__ inline void give_up(const Context *context, int32_t loc, int32_t peer,
                                            uint64_t flag, uint64_t expected, uint64_t seen) {
  Record *record = context->record;
  uint64_t linger_ns = 2000000000ull;
  if (atomicCAS_system(&record->state, 0u, 1u) == 0u) {
    volatile Record *out = record;
    out->loc = loc;
    out->rank = context->rank;
    out->peer = peer;
    out->flag = flag;
    out->expected = expected;
    out->seen = seen;
    out->block[0] = blockIdx.x;
    out->block[1] = blockIdx.y;
    out->block[2] = blockIdx.z;
    out->thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    __threadfence_system();
    out->state = 2u;
    __threadfence_system();
    linger_ns = 20000000ull; // the host reads the record while the grid still runs
  }
  trap_after(linger_ns);
}

#endif

} // namespace tw
