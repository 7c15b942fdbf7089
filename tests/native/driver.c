// A driver without a GPU: copies and writes at once, remembers what it was asked, and fails when
// told. With it a kernel with the calling convention of TileLang's host code, which remembers its
// arguments.
#include <stdint.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

typedef struct {
  size_t src_x, src_y;
  int src_type;
  void *src_host;
  uint64_t src;
  void *src_array;
  size_t src_pitch, dst_x, dst_y;
  int dst_type;
  void *dst_host;
  uint64_t dst;
  void *dst_array;
  size_t dst_pitch, width, height;
} Rows;

typedef struct {
  int kind;
  uint64_t address, value;
  unsigned flags;
  uint64_t alias, unused;
} WordOperation;

typedef struct {
  int64_t function;
  uint64_t arguments[4];
} Asked;

enum { COPY, ROWS, WRITE, RECORD, WAIT, KERNEL, WAIT_VALUE, WORDS };

Asked asked[256];
int64_t count;
int64_t fails_at = -1;

static int note(int64_t function, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  if (count == fails_at)
    return 700;
  Asked one = {function, {a, b, c, d}};
  asked[count++ % 256] = one;
  return 0;
}

int cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t bytes, void *stream) {
  int status = note(COPY, dst, src, bytes, (uint64_t)stream);
  if (!status)
    memcpy((void *)dst, (void *)src, bytes);
  return status;
}

int cuMemcpy2DAsync_v2(const Rows *r, void *stream) {
  int status = note(ROWS, r->dst, r->src, r->src_type * 10 + r->dst_type, (uint64_t)stream);
  for (size_t i = 0; !status && i < r->height; i++)
    memcpy((char *)r->dst + i * r->dst_pitch, (char *)r->src + i * r->src_pitch, r->width);
  return status;
}

int cuStreamBatchMemOp_v2(void *stream, unsigned words, WordOperation *of, unsigned flags) {
  int status = note(WORDS, (uint64_t)stream, words, flags, 0);
  for (unsigned i = 0; !status && i < words; i++) {
    note(of[i].kind == 1 ? WAIT_VALUE : WRITE, of[i].address, of[i].value, of[i].flags, 0);
    if (of[i].kind == 2)
      *(uint32_t *)of[i].address = of[i].value;
  }
  return status;
}

int cuEventRecord(void *event, void *stream) {
  return note(RECORD, (uint64_t)event, (uint64_t)stream, 0, 0);
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  return note(WAIT, (uint64_t)stream, (uint64_t)event, flags, 0);
}

TVMFFIAny given[16];
DLTensor tensors[16];
int64_t sizes[16][4];

int __tvm_ffi_kernel(void *self, const TVMFFIAny *args, int32_t number, TVMFFIAny *result) {
  if (note(KERNEL, (uint64_t)TVMFFIEnvGetStream(kDLCUDA, 1), number, 0, 0)) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", "kernel nothing input A device_type mismatch");
    return -1;
  }
  for (int i = 0; i < number; i++) {
    given[i] = args[i];
    if (args[i].type_index != kTVMFFIDLTensorPtr)
      continue;
    tensors[i] = *(DLTensor *)args[i].v_ptr;
    for (int axis = 0; axis < 2 && axis < tensors[i].ndim; axis++) {
      sizes[i][axis] = tensors[i].shape[axis];
      sizes[i][2 + axis] = tensors[i].strides[axis];
    }
  }
  return 0;
}
