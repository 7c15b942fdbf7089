// Announcements of rows in ragged tensors. Declarations: builtins/ragged.py.
#pragma once
#include "context.cuh"

namespace tw {

// Stores the announced rows of this launch and, for each tile of the segment, the announced units
// of all launches so far. A count outside of 0..rows is reported to the host, and the grid aborts
// before anything is stored. A signal after this call publishes the words.
__device__ __forceinline__ void announce(uint32_t *words, int32_t count, uint32_t *total,
                                         int32_t rows, int32_t row_size, int32_t tile,
                                         int64_t context, int32_t loc) {
  if (static_cast<uint32_t>(count) > static_cast<uint32_t>(rows)) {
    const Context *c = reinterpret_cast<const Context *>(context);
    give_up(c, loc, -1, reinterpret_cast<uint64_t>(words), static_cast<uint64_t>(rows),
            static_cast<uint64_t>(static_cast<int64_t>(count)));
    __builtin_unreachable();
  }
  asm volatile("st.global.b32 [%0], %1;"
               :
               : "l"(words), "r"(static_cast<uint32_t>(count))
               : "memory");
  for (int32_t left = count, before = 0; before < rows; before += tile, left -= tile) {
    const int32_t here = left < 0 ? 0 : left < tile ? left : tile;
    const uint32_t sum = *total + static_cast<uint32_t>(here) * static_cast<uint32_t>(row_size);
    *total++ = sum;
    asm volatile("st.global.b32 [%0], %1;" : : "l"(++words), "r"(sum) : "memory");
  }
}

// Checks the rows that the next statement writes. A word holds the last launch that wrote the row,
// and the units that it has written; blocks may write parts of one row.
template <class T>
__device__ __forceinline__ void check_row(const T *ref, uint64_t *words, uint32_t *written,
                                          int32_t row, int32_t count, int32_t rows, int32_t units,
                                          int32_t most, uint32_t launch, int64_t context,
                                          int32_t loc) {
  const Context *c = reinterpret_cast<const Context *>(context);
  for (int32_t r = row; r < row + count; ++r) {
    bool fits = 0 <= r && r < rows;
    if (fits) {
      unsigned long long *word = reinterpret_cast<unsigned long long *>(words + r);
      unsigned long long seen = *reinterpret_cast<volatile unsigned long long *>(word);
      for (;;) {
        const uint32_t before = seen >> 32 == launch ? static_cast<uint32_t>(seen) : 0;
        const uint32_t sum = before + static_cast<uint32_t>(units);
        fits = sum <= static_cast<uint32_t>(most);
        const unsigned long long stored =
            atomicCAS(word, seen, static_cast<unsigned long long>(launch) << 32 | sum);
        if (stored == seen) {
          break;
        }
        seen = stored;
      }
    }
    if (!fits) {
      give_up(c, loc, -1, reinterpret_cast<uint64_t>(ref), static_cast<uint64_t>(rows),
              static_cast<uint64_t>(static_cast<int64_t>(r)));
      __builtin_unreachable();
    }
  }
  atomicAdd(written, static_cast<uint32_t>(units * count));
}

// Checks that as many units are written as announced.
template <class T>
__device__ __forceinline__ void check_amount(const T *ref, const uint32_t *written,
                                             const uint32_t *total, int32_t tiles, int64_t context,
                                             int32_t loc) {
  const uint32_t seen = *reinterpret_cast<const volatile uint32_t *>(written);
  uint32_t expected = 0;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    expected += reinterpret_cast<const volatile uint32_t *>(total)[tile];
  }
  if (seen != expected) {
    const Context *c = reinterpret_cast<const Context *>(context);
    give_up(c, loc, -1, reinterpret_cast<uint64_t>(ref), expected, seen);
    __builtin_unreachable();
  }
}

} // namespace tw
