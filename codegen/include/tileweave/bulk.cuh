// Bulk copies between shared and global memory by one thread. Declarations: builtins/bulk.py.
// PTX ISA: cp.async.bulk, cp.reduce.async.bulk, mbarrier.expect_tx. They need sm_90 when
// instantiated.
#pragma once
#include "qualifiers.cuh"

namespace tw {

namespace detail {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#define TW_BULK_REDUCE(OP)                                                                         \
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." OP " [%0], [%1], %2;"         \
               :                                                                                   \
               : "l"(dst), "r"(src), "r"(bytes)                                                    \
               : "memory")

#define TW_BULK_MIN_MAX(OP)                                                                        \
  if constexpr (type == Type::f16) {                                                               \
    TW_BULK_REDUCE(OP ".f16");                                                                     \
  } else if constexpr (type == Type::bf16) {                                                       \
    TW_BULK_REDUCE(OP ".bf16");                                                                    \
  } else if constexpr (type == Type::u32) {                                                        \
    TW_BULK_REDUCE(OP ".u32");                                                                     \
  } else if constexpr (type == Type::s32) {                                                        \
    TW_BULK_REDUCE(OP ".s32");                                                                     \
  } else if constexpr (type == Type::u64) {                                                        \
    TW_BULK_REDUCE(OP ".u64");                                                                     \
  } else {                                                                                         \
    TW_BULK_REDUCE(OP ".s64");                                                                     \
  }

#define TW_BULK_BITWISE(OP)                                                                        \
  if constexpr (type == Type::u32 || type == Type::s32) {                                          \
    TW_BULK_REDUCE(OP ".b32");                                                                     \
  } else {                                                                                         \
    TW_BULK_REDUCE(OP ".b64");                                                                     \
  }

template <Type type, Op op>
__device__ __forceinline__ void bulk_reduce(void *dst, uint32_t src, uint32_t bytes) {
  if constexpr (op == Op::min) {
    TW_BULK_MIN_MAX("min")
  } else if constexpr (op == Op::max) {
    TW_BULK_MIN_MAX("max")
  } else if constexpr (op == Op::and_) {
    TW_BULK_BITWISE("and")
  } else if constexpr (op == Op::or_) {
    TW_BULK_BITWISE("or")
  } else if constexpr (op == Op::xor_) {
    TW_BULK_BITWISE("xor")
  } else if constexpr (type == Type::f16) {
    TW_BULK_REDUCE("add.noftz.f16");
  } else if constexpr (type == Type::bf16) {
    TW_BULK_REDUCE("add.noftz.bf16");
  } else if constexpr (type == Type::f32) {
    TW_BULK_REDUCE("add.f32");
  } else if constexpr (type == Type::f64) {
    TW_BULK_REDUCE("add.f64");
  } else if constexpr (type == Type::u32 || type == Type::s32) {
    TW_BULK_REDUCE("add.u32");
  } else { // PTX has no add.s64, and add.u64 yields the same bits
    TW_BULK_REDUCE("add.u64");
  }
}

#undef TW_BULK_MIN_MAX
#undef TW_BULK_BITWISE
#undef TW_BULK_REDUCE

} // namespace detail

template <class T>
__device__ __forceinline__ void bulk_load(T *dst, const T *src, int32_t size, void *barrier) {
  const uint32_t bytes = static_cast<uint32_t>(size) * sizeof(T);
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :
               : "r"(detail::shared_address(barrier)), "r"(bytes)
               : "memory");
  // shared::cluster includes the block's own memory; shared::cta needs a newer nvcc here.
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :
               : "r"(detail::shared_address(dst)), "l"(src), "r"(bytes),
                 "r"(detail::shared_address(barrier))
               : "memory");
}

template <class T> __device__ __forceinline__ void bulk_store(T *dst, const T *src, int32_t size) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(dst), "r"(detail::shared_address(src)),
                 "r"(static_cast<uint32_t>(size) * static_cast<uint32_t>(sizeof(T)))
               : "memory");
}

template <Type type, Op op, class T>
__device__ __forceinline__ void bulk_reduce(T *dst, const T *src, int32_t size) {
  detail::bulk_reduce<type, op>(dst, detail::shared_address(src),
                                static_cast<uint32_t>(size) * static_cast<uint32_t>(sizeof(T)));
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int n, bool read> __device__ __forceinline__ void bulk_wait() {
  if constexpr (read) {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(n) : "memory");
  } else {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(n) : "memory");
  }
}

// Waits until the bulk stores of the calling thread are at their destination. Passes insert it
// before a release that a bulk store reaches. It commits first, because a wait covers only stores
// in groups.
__device__ __forceinline__ void complete_bulk_stores() {
  bulk_commit();
  bulk_wait<0, false>();
}

} // namespace tw
