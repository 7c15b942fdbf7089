// Barriers of several blocks. Declarations: builtins/barriers.py. One thread of each block calls
// them after the threads of the block have synchronized. Words: [0] blocks of the grid, [1] epoch
// of the rank barrier, [2 + r] arrivals from rank r. The grid word counts up to bit 31 and flips
// it, so no word needs a reset.
#pragma once
#include "context.cuh"
#include "signals.cuh"

namespace tw {

namespace detail {

struct BarrierWords {
  uint32_t *own;
  uint64_t heap_stride;
  const Context *context;

  __device__ BarrierWords(const void *words, int64_t runtime)
      : context(reinterpret_cast<const Context *>(runtime)) {
    own = words != nullptr ? static_cast<uint32_t *>(const_cast<void *>(words))
                           : reinterpret_cast<uint32_t *>(context->barrier);
    heap_stride = context->heap_stride;
  }
  __device__ uint32_t *of_rank(int32_t rank) const {
    int64_t offset = static_cast<int64_t>(rank - context->rank) * static_cast<int64_t>(heap_stride);
    return reinterpret_cast<uint32_t *>(reinterpret_cast<char *>(own) + offset);
  }
};

__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t *word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(word), "r"(value)
               : "memory");
  return old;
}

constexpr uint32_t kFlip = 0x80000000u;

// Block 0 adds the value that makes the sum of all arrivals 2^31. The flip of bit 31 releases all
// blocks.
template <class BeforeRelease>
__device__ __forceinline__ void grid(const BarrierWords &words, int32_t loc,
                                     BeforeRelease before_release) {
  const uint32_t blocks = gridDim.x * gridDim.y * gridDim.z;
  uint32_t *word = words.own;
  int64_t context = reinterpret_cast<int64_t>(words.context);
  if ((blockIdx.x | blockIdx.y | blockIdx.z) == 0) {
    const uint32_t others = blocks - 1;
    poll<Scope::gpu, Sem::acquire>(word, others, -1, context, loc,
                                   [](uint32_t seen, uint32_t n) { return (seen & ~kFlip) == n; });
    before_release();
    add_acq_rel_gpu(word, kFlip - others);
  } else {
    const uint32_t flipped = ~add_acq_rel_gpu(word, 1) & kFlip;
    poll<Scope::gpu, Sem::acquire>(
        word, flipped, -1, context, loc,
        [](uint32_t seen, uint32_t flipped) { return (seen & kFlip) == flipped; });
  }
}

__device__ __forceinline__ void ranks(const BarrierWords &words, int32_t loc) {
  const Context *context = words.context;
  const uint32_t epoch = ++words.own[1];
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  for (int32_t step = 1; step < context->world_size; ++step) {
    const int32_t peer = (context->rank + step) % context->world_size;
    signal<Type::u32, Op::add, Scope::sys, Sem::release>(words.of_rank(peer) + 2 + context->rank,
                                                         1u);
  }
  for (int32_t step = 1; step < context->world_size; ++step) {
    const int32_t peer = (context->rank + step) % context->world_size;
    wait_reached<Type::u32, Scope::sys, Sem::acquire>(words.own + 2 + peer, epoch, peer,
                                                      reinterpret_cast<int64_t>(context), loc);
  }
}

} // namespace detail

__device__ __forceinline__ void sync_grid(const void *words, int64_t context, int32_t loc) {
  detail::grid(detail::BarrierWords(words, context), loc, [] {});
}

__device__ __forceinline__ void sync_ranks(const void *words, int64_t context, int32_t loc) {
  detail::ranks(detail::BarrierWords(words, context), loc);
}

__device__ __forceinline__ void barrier_blocks(const void *words, int64_t context, int32_t loc) {
  const detail::BarrierWords barrier(words, context);
  detail::grid(barrier, loc, [&] { detail::ranks(barrier, loc); });
}

} // namespace tw
