// What enqueue.cc says of the driver is what cuda.h says.
#include <cuda.h>

#include "enqueue.cc"

using tileweave::Driver;
using tileweave::Rows;
using tileweave::WordOperation;

static_assert(sizeof(Rows) == sizeof(CUDA_MEMCPY2D));
#define SAME(ours, theirs) static_assert(offsetof(Rows, ours) == offsetof(CUDA_MEMCPY2D, theirs))
SAME(src_x, srcXInBytes);
SAME(src_y, srcY);
SAME(src_type, srcMemoryType);
SAME(src, srcDevice);
SAME(src_pitch, srcPitch);
SAME(dst_x, dstXInBytes);
SAME(dst_y, dstY);
SAME(dst_type, dstMemoryType);
SAME(dst, dstDevice);
SAME(dst_pitch, dstPitch);
SAME(width, WidthInBytes);
SAME(height, Height);
static_assert(tileweave::kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);

static_assert(sizeof(WordOperation) == sizeof(CUstreamBatchMemOpParams));
#define SAME_WORD(ours, theirs)                                                                    \
  static_assert(offsetof(WordOperation, ours) ==                                                   \
                offsetof(CUstreamBatchMemOpParams, waitValue.theirs));                             \
  static_assert(offsetof(WordOperation, ours) ==                                                   \
                offsetof(CUstreamBatchMemOpParams, writeValue.theirs))
SAME_WORD(kind, operation);
SAME_WORD(address, address);
SAME_WORD(value, value);
SAME_WORD(flags, flags);
SAME_WORD(alias, alias);

using Address = CUdeviceptr;
using Stream = CUstream;
#define TAKES(name, ...) static_assert(std::is_same_v<decltype(&name), CUresult (*)(__VA_ARGS__)>)
TAKES(cuMemcpyDtoDAsync_v2, Address, Address, size_t, Stream);
TAKES(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D *, Stream);
TAKES(cuStreamBatchMemOp_v2, Stream, unsigned, CUstreamBatchMemOpParams *, unsigned);
TAKES(cuEventRecord, CUevent, Stream);
TAKES(cuStreamWaitEvent, Stream, CUevent, unsigned);
static_assert(sizeof(Address) == sizeof(uint64_t) && sizeof(CUresult) == sizeof(int));
