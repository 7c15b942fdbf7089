// Announcements of rows in ragged tensors. Declarations: builtins/ragged.py.
#pragma once
#include "context.cuh"

namespace tw {

// Stores the announced rows of this launch and the announced elements of all launches so far.
// A count outside of 0..rows is reported to the host, and the grid aborts before anything is
// stored. A signal after this call publishes the two words.
__device__ __forceinline__ void announce(uint32_t *words, int32_t count, uint32_t *total,
                                         int32_t rows, int32_t row_size, int64_t context,
                                         int32_t loc) {
  if (static_cast<uint32_t>(count) > static_cast<uint32_t>(rows)) {
    const Context *c = reinterpret_cast<const Context *>(context);
    give_up(c, loc, -1, reinterpret_cast<uint64_t>(words), static_cast<uint64_t>(rows),
            static_cast<uint64_t>(static_cast<int64_t>(count)));
    __builtin_unreachable();
  }
  const uint32_t sum = *total + static_cast<uint32_t>(count) * static_cast<uint32_t>(row_size);
  *total = sum;
  asm volatile("st.global.v2.b32 [%0], {%1, %2};"
               :
               : "l"(words), "r"(static_cast<uint32_t>(count)), "r"(sum)
               : "memory");
}

} // namespace tw
