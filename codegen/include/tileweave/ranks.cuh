// Values that are equal on all ranks. Declarations: builtins/ranks.py.
#pragma once
#include <cstdint>

namespace tw {

__device__ __forceinline__ int32_t rank_uniform(int32_t value) { return value; }

} // namespace tw
