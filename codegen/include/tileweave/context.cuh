// Context: values from the runtime for every kernel. Record: report of a kernel to the runtime
// before it aborts. runtime/host/context.py reads and writes the same layouts: change both files
// together. The structs also compile for the host, where tests/runtime/test_context.py compares
// the layouts.
#pragma once
#include <stdint.h>

namespace tw {

// In pinned host memory, one for each process. `state` is 0 until a thread claims the record, 1
// while that thread writes it, and 2 when it is complete.
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

// One event of a trace; see record.cuh.
struct TraceEvent {
  uint64_t begin; // ns of the GPU's clock
  uint64_t end;
  uint64_t flag; // address; 0 if the event has none
  int64_t seen;
  int64_t wanted;
  int32_t launch;
  int32_t event;
  uint32_t block;
  uint32_t sm;
};

// In device memory, followed by `capacity` events, while a trace is recorded.
struct TraceBuffer {
  uint64_t count; // events so far, also those that had no room
  uint64_t capacity;
};

// In device memory, one for each process.
struct Context {
  uint64_t timeout_ns; // 0: wait without limit
  int32_t rank;
  int32_t world_size;
  uint64_t barrier;     // address of this rank's barrier words
  uint64_t heap_stride; // bytes from one rank's heap to the next
  Record *record;
  TraceBuffer *trace; // null: no trace is recorded
};

#ifdef __CUDACC__

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Aborts the grid after a delay. It is separate from give_up, because warps with different numbers
// of registers (setmaxnreg) call give_up, and ptxas finds no register count (C7600) for a function
// with a loop that such warps call.
__device__ __noinline__ inline void trap_after(uint64_t linger_ns) {
  for (uint64_t start = now_ns(); now_ns() - start < linger_ns;) {
    __nanosleep(10000);
  }
  asm volatile("trap;");
}

// Writes the record for the host and aborts the grid. One thread of the device writes; the others
// wait, because their traps would abort the grid before the record is written. If the record
// belongs to an earlier kernel, so that no thread of this grid writes it, they trap after a longer
// delay. There is no printf, because it would make ptxas serialize wgmma in the whole kernel.
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
