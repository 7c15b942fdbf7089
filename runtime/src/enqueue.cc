/*!
 * Enqueue a call of a plan in one native call: driver calls, and kernels that TileLang compiled.
 *
 * Needs only headers of apache-tvm-ffi; the driver's functions are looked up when a call is
 * recorded. runtime/host/native.py builds and loads it.
 */
#include <dlfcn.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace tileweave {

namespace ffi = tvm::ffi;

/*! \brief Addresses of the tensors of a call. */
using Addresses = std::vector<uint64_t>;
/*! \brief Enqueues one operation; returns the driver's status, 0 on success. */
using Operation = std::function<int(const Addresses &)>;
using Arguments = ffi::Array<ffi::Any>;

/*! \brief An address, or a byte offset into the index-th tensor of a call. */
struct Place {
  explicit Place(const ffi::Any &encoded) {
    if (auto pair = encoded.as<ffi::Array<int64_t>>()) {
      index = (*pair)[0];
      offset = (*pair)[1];
    } else {
      offset = encoded.cast<int64_t>();
    }
  }

  uint64_t operator()(const Addresses &addresses) const {
    return (index < 0 ? 0 : addresses[index]) + static_cast<uint64_t>(offset);
  }

  int64_t index = -1;
  int64_t offset = 0;
};

/*! \brief CUDA_MEMCPY2D of cuda.h, version 2. */
struct Rows {
  size_t src_x, src_y;
  int src_type;
  const void *src_host;
  uint64_t src;
  void *src_array;
  size_t src_pitch;
  size_t dst_x, dst_y;
  int dst_type;
  void *dst_host;
  uint64_t dst;
  void *dst_array;
  size_t dst_pitch;
  size_t width, height;
};
constexpr int kMemoryTypeDevice = 2;

/*! \brief CUstreamBatchMemOpParams of cuda.h, for a wait for a word or a write of one. */
struct WordOperation {
  int kind;
  uint64_t address;
  uint64_t value;
  unsigned flags;
  uint64_t alias;
  uint64_t unused;
};

/*! \brief The functions of the driver that plans use. */
class Driver {
public:
  using Stream = void *;
  using Event = void *;

  explicit Driver(const std::string &library) : library_(dlopen(library.c_str(), RTLD_NOW)) {
    if (library_ == nullptr)
      TVM_FFI_THROW(RuntimeError) << dlerror();
    Find(&copy, "cuMemcpyDtoDAsync_v2");
    Find(&copy_rows, "cuMemcpy2DAsync_v2");
    Find(&words, "cuStreamBatchMemOp_v2");
    Find(&record, "cuEventRecord");
    Find(&wait, "cuStreamWaitEvent");
  }

  int (*copy)(uint64_t dst, uint64_t src, size_t bytes, Stream);
  int (*copy_rows)(const Rows *, Stream);
  int (*words)(Stream, unsigned count, WordOperation *, unsigned flags);
  int (*record)(Event, Stream);
  int (*wait)(Stream, Event, unsigned flags);

private:
  template <typename Function> void Find(Function **function, const char *name) {
    *function = reinterpret_cast<Function *>(dlsym(library_, name));
    if (*function == nullptr)
      TVM_FFI_THROW(RuntimeError) << dlerror();
  }

  void *library_;
};

void *Handle(const ffi::Any &number) { return reinterpret_cast<void *>(number.cast<int64_t>()); }

/*! \brief Set the stream of kernel launches for the lifetime of this object. */
class CurrentStream {
public:
  CurrentStream(int32_t device, void *stream) : device_(device) {
    TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvSetStream(kDLCUDA, device, stream, &before_));
  }
  ~CurrentStream() { TVMFFIEnvSetStream(kDLCUDA, device_, before_, nullptr); }
  CurrentStream(const CurrentStream &) = delete;
  CurrentStream &operator=(const CurrentStream &) = delete;

private:
  int32_t device_;
  void *before_ = nullptr;
};

/*! \brief A tensor argument of a kernel, whose address may differ between calls. */
class Tensor {
public:
  Tensor(const DLTensor &like, const Place &place)
      : like_(like), shape_(like.shape, like.shape + like.ndim),
        strides_(like.strides, like.strides + like.ndim), place_(place) {}

  DLTensor operator()(const Addresses &addresses) {
    DLTensor tensor = like_;
    tensor.shape = shape_.data();
    tensor.strides = strides_.data();
    tensor.data = reinterpret_cast<void *>(place_(addresses));
    return tensor;
  }

private:
  DLTensor like_;
  std::vector<int64_t> shape_, strides_;
  Place place_;
};

/*! \brief Launch of a kernel on numbers and tensors. */
class Launch {
public:
  /*!
   * \param encoded kernel, stream, device, then its arguments: a number, or a pair: the index of
   *  the tensor in `tensors` that has its type and shape, and its address as `Place` accepts it.
   */
  Launch(const Arguments &encoded, const std::vector<DLTensor> &tensors)
      : kernel_(encoded[0].cast<ffi::Function>()), stream_(Handle(encoded[1])),
        device_(encoded[2].cast<int32_t>()) {
    for (size_t i = 3; i < encoded.size(); ++i) {
      if (auto pair = encoded[i].as<Arguments>()) {
        tensors_.emplace_back(tensors.at((*pair)[0].cast<int64_t>()), Place((*pair)[1]));
        arguments_.emplace_back(nullptr);
      } else {
        arguments_.push_back(encoded[i]);
      }
    }
  }

  int operator()(const Addresses &addresses) {
    std::vector<DLTensor> tensors;
    for (Tensor &tensor : tensors_)
      tensors.push_back(tensor(addresses));
    std::vector<ffi::AnyView> arguments(arguments_.begin(), arguments_.end());
    auto tensor = tensors.begin();
    for (ffi::AnyView &argument : arguments) {
      if (argument == nullptr)
        argument = &*tensor++;
    }
    CurrentStream stream(device_, stream_);
    ffi::Any result;
    kernel_.CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
    return 0;
  }

private:
  ffi::Function kernel_;
  void *stream_;
  int32_t device_;
  std::vector<Tensor> tensors_;
  std::vector<ffi::Any> arguments_;
};

/*! \brief Return the operation `name` with `arguments`: a driver call, or a kernel launch. */
Operation Decode(const std::string &name, const Arguments &arguments,
                 const std::shared_ptr<Driver> &driver, const std::vector<DLTensor> &tensors) {
  if (name == "launch")
    return Launch(arguments, tensors);
  if (name == "cuMemcpyDtoDAsync") {
    Place dst(arguments[0]), src(arguments[1]);
    size_t bytes = arguments[2].cast<int64_t>();
    void *stream = Handle(arguments[3]);
    return [=](const Addresses &at) { return driver->copy(dst(at), src(at), bytes, stream); };
  }
  if (name == "cuMemcpy2DAsync") {
    Place dst(arguments[0]), src(arguments[1]);
    Rows rows{};
    rows.src_type = rows.dst_type = kMemoryTypeDevice;
    rows.height = arguments[2].cast<int64_t>();
    rows.width = arguments[3].cast<int64_t>();
    rows.dst_pitch = arguments[4].cast<int64_t>();
    rows.src_pitch = arguments[5].cast<int64_t>();
    void *stream = Handle(arguments[6]);
    return [=](const Addresses &at) {
      Rows copied = rows;
      copied.dst = dst(at);
      copied.src = src(at);
      return driver->copy_rows(&copied, stream);
    };
  }
  if (name == "cuStreamBatchMemOp") {
    void *stream = Handle(arguments[0]);
    std::vector<WordOperation> words;
    std::vector<Place> places;
    for (size_t i = 1; i < arguments.size(); ++i) {
      auto word = arguments[i].cast<Arguments>();
      WordOperation operation{};
      operation.kind = word[0].cast<int>();
      operation.value = word[2].cast<int64_t>();
      words.push_back(operation);
      places.emplace_back(word[1]);
    }
    return [=](const Addresses &at) mutable {
      for (size_t i = 0; i < words.size(); ++i)
        words[i].address = places[i](at);
      return driver->words(stream, static_cast<unsigned>(words.size()), words.data(), 0);
    };
  }
  void *first = Handle(arguments[0]);
  void *second = Handle(arguments[1]);
  if (name == "cuEventRecord") {
    return [=](const Addresses &) { return driver->record(first, second); };
  }
  if (name == "cuStreamWaitEvent") {
    unsigned flags = arguments[2].cast<int64_t>();
    return [=](const Addresses &) { return driver->wait(first, second, flags); };
  }
  TVM_FFI_THROW(ValueError) << "enqueue: operation " << name;
  TVM_FFI_UNREACHABLE();
}

/*!
 * \brief Record operations.
 *
 * Arguments: the driver's library; the operations, each a name and its arguments; the tensors that
 * launches refer to. A tensor outlives the result, or only its type and shape are used.
 *
 * Returns a function that accepts the addresses of a call's tensors and enqueues all operations. It
 * returns 0, or (index of the operation that failed + 1) << 32 | the driver's status.
 */
void Ready(ffi::PackedArgs args, ffi::Any *result) {
  auto driver = std::make_shared<Driver>(args[0].cast<std::string>());
  std::vector<DLTensor> tensors;
  for (int i = 2; i < args.size(); ++i)
    tensors.push_back(*args[i].cast<DLTensor *>());
  std::vector<Operation> operations;
  for (const Arguments &encoded : args[1].cast<ffi::Array<Arguments>>()) {
    Arguments arguments(encoded.begin() + 1, encoded.end());
    operations.push_back(Decode(encoded[0].cast<std::string>(), arguments, driver, tensors));
  }
  *result = ffi::Function::FromPacked([operations](ffi::PackedArgs args, ffi::Any *result) mutable {
    Addresses addresses;
    for (int i = 0; i < args.size(); ++i) {
      addresses.push_back(static_cast<uint64_t>(args[i].cast<int64_t>()));
    }
    for (size_t i = 0; i < operations.size(); ++i) {
      if (int status = operations[i](addresses)) {
        *result = static_cast<int64_t>((i + 1) << 32 | static_cast<uint32_t>(status));
        return;
      }
    }
    *result = 0;
  });
}

} // namespace tileweave

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_ready(void *, const TVMFFIAny *args, int32_t count,
                                                  TVMFFIAny *result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  tileweave::Ready({reinterpret_cast<const tvm::ffi::AnyView *>(args), count},
                   reinterpret_cast<tvm::ffi::Any *>(result));
  TVM_FFI_SAFE_CALL_END();
}
