// Copies between global memories by the threads of a block or a warp. Declarations:
// builtins/put_get.py. PTX ISA: ld, st. The address arithmetic also compiles for the host, where
// tests/builtins/test_put_get_host.py tests it.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define TW_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TW_HOST_DEVICE inline
#endif

namespace tw {

namespace detail {

template <int bytes> struct Vector;
template <> struct alignas(16) Vector<16> {
  uint32_t x, y, z, w;
};
template <> struct alignas(8) Vector<8> {
  uint32_t x, y;
};
template <> struct alignas(4) Vector<4> {
  uint32_t x;
};
template <> struct alignas(2) Vector<2> {
  uint16_t x;
};
template <> struct Vector<1> {
  uint8_t x;
};

// Weak loads are sufficient: the wait before them orders the data of a peer, and its acquire also
// invalidates L1. Volatile asm keeps them after that wait, and avoids ld.global.nc, which the wait
// would not order. L1::no_allocate: each byte is used once.
template <int bytes> TW_HOST_DEVICE Vector<bytes> load(const void *address) {
#ifdef __CUDA_ARCH__
  Vector<bytes> v;
  if constexpr (bytes == 16) {
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(address)
                 : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(v.x) : "l"(address) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("ld.global.L1::no_allocate.b16 %0, [%1];" : "=h"(v.x) : "l"(address) : "memory");
  } else {
    uint32_t wide;
    asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(wide) : "l"(address) : "memory");
    v.x = static_cast<uint8_t>(wide);
  }
  return v;
#else
  return *static_cast<const Vector<bytes> *>(address);
#endif
}

template <int bytes> TW_HOST_DEVICE void store(void *address, Vector<bytes> v) {
#ifdef __CUDA_ARCH__
  if constexpr (bytes == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};"
                 :
                 : "l"(address), "r"(v.x), "r"(v.y)
                 : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("st.global.b32 [%0], %1;" : : "l"(address), "r"(v.x) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("st.global.b16 [%0], %1;" : : "l"(address), "h"(v.x) : "memory");
  } else {
    asm volatile("st.global.u8 [%0], %1;"
                 :
                 : "l"(address), "r"(static_cast<uint32_t>(v.x))
                 : "memory");
  }
#else
  *static_cast<Vector<bytes> *>(address) = v;
#endif
}

// Copies the share of thread `thread` of `threads` of `count` vectors, with four loads in flight.
template <int bytes>
TW_HOST_DEVICE void copy_vectors(char *dst, const char *src, int64_t count, int64_t thread,
                                 int64_t threads) {
  const int64_t stride = threads * bytes;
  const int64_t end = count * bytes;
  int64_t offset = thread * bytes;
  for (; offset + 3 * stride < end; offset += 4 * stride) {
    const Vector<bytes> a = load<bytes>(src + offset);
    const Vector<bytes> b = load<bytes>(src + offset + stride);
    const Vector<bytes> c = load<bytes>(src + offset + 2 * stride);
    const Vector<bytes> d = load<bytes>(src + offset + 3 * stride);
    store<bytes>(dst + offset, a);
    store<bytes>(dst + offset + stride, b);
    store<bytes>(dst + offset + 2 * stride, c);
    store<bytes>(dst + offset + 3 * stride, d);
  }
  for (; offset < end; offset += stride) {
    store<bytes>(dst + offset, load<bytes>(src + offset));
  }
}

// Copies `size` items of `item` bytes: items before the first whole vector, vectors, and the items
// after them.
template <int bytes, int item>
TW_HOST_DEVICE void copy_aligned(char *dst, const char *src, int64_t size, int64_t thread,
                                 int64_t threads) {
  if constexpr (bytes <= item) {
    copy_vectors<bytes>(dst, src, size, thread, threads);
  } else {
    constexpr int64_t per_vector = bytes / item;
    int64_t head = static_cast<int64_t>((0 - reinterpret_cast<uint64_t>(dst)) % bytes) / item;
    head = head < size ? head : size;
    const int64_t vectors = (size - head) / per_vector;
    const int64_t tail = head + vectors * per_vector;
    copy_vectors<item>(dst, src, head, thread, threads);
    copy_vectors<bytes>(dst + head * item, src + head * item, vectors, thread, threads);
    copy_vectors<item>(dst + tail * item, src + tail * item, size - tail, thread, threads);
  }
}

// Copies with the widest vectors to which source and destination can both be aligned.
template <int item>
TW_HOST_DEVICE void copy(char *dst, const char *src, int64_t size, int64_t thread,
                         int64_t threads) {
  const uint64_t distance = reinterpret_cast<uint64_t>(dst) - reinterpret_cast<uint64_t>(src);
  if (distance % 16 == 0) {
    copy_aligned<16, item>(dst, src, size, thread, threads);
  } else if (item < 8 && distance % 8 == 0) {
    copy_aligned<8, item>(dst, src, size, thread, threads);
  } else if (item < 4 && distance % 4 == 0) {
    copy_aligned<4, item>(dst, src, size, thread, threads);
  } else if (item < 2 && distance % 2 == 0) {
    copy_aligned<2, item>(dst, src, size, thread, threads);
  } else {
    copy_vectors<item>(dst, src, size, thread, threads);
  }
}

} // namespace detail

#define TW_COPY(NAME)                                                                              \
  template <class T>                                                                               \
  TW_HOST_DEVICE void NAME##_block(const T *src, T *dst, int64_t size, int32_t thread,             \
                                   int32_t threads) {                                              \
    detail::copy<sizeof(T)>(reinterpret_cast<char *>(dst), reinterpret_cast<const char *>(src),    \
                            size, thread, threads);                                                \
  }                                                                                                \
  template <class T>                                                                               \
  TW_HOST_DEVICE void NAME##_warp(const T *src, T *dst, int64_t size, int32_t thread) {            \
    NAME##_block(src, dst, size, thread % 32, 32);                                                 \
  }

TW_COPY(put)
TW_COPY(get)

#undef TW_COPY
#undef TW_HOST_DEVICE

} // namespace tw
