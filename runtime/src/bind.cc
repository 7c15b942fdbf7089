/*!
 * What a program asks its host for at each launch, answered without Python.
 *
 * See passes/bind_runtime.py for who asks, runtime/host_functions.py for who says the values.
 */
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tileweave {

namespace ffi = tvm::ffi;

/*! \brief The values of the session, none where there is none. */
struct Answers {
  std::vector<std::pair<std::string, int64_t>> values;
  /*! \brief Is asked what stands not among the values; says so by an error, too. */
  ffi::Function otherwise;

  const int64_t *Of(std::string_view name) const {
    for (const auto &[known, value] : values) {
      if (known == name)
        return &value;
    }
    return nullptr;
  }
};

/*! \brief Never destroyed: Python, to which `otherwise` belongs, ends before static variables do.
 */
Answers &TheAnswers() {
  static auto *answers = new Answers;
  return *answers;
}

/*! \brief Arguments: who is asked otherwise; then names and values in turn. */
void Say(ffi::PackedArgs args) {
  Answers &answers = TheAnswers();
  answers.otherwise = args[0].cast<ffi::Function>();
  answers.values.clear();
  for (int i = 1; i + 1 < args.size(); i += 2)
    answers.values.emplace_back(args[i].cast<std::string>(), args[i + 1].cast<int64_t>());
}

/*! \brief Arguments: slots on the host's stack, and whose values they get, parted by commas. */
void Bind(ffi::PackedArgs args, ffi::Any *result) {
  const Answers &answers = TheAnswers();
  auto *slot = static_cast<TVMFFIAny *>(args[0].cast<void *>());
  std::string given = args[1].cast<std::string>();
  std::string_view names = given;
  while (true) {
    size_t end = names.find(',');
    const int64_t *value = answers.Of(names.substr(0, end));
    if (value == nullptr) {
      answers.otherwise.CallPacked(args, result);
      return;
    }
    (slot++)->v_int64 = *value;
    if (end == std::string_view::npos)
      return;
    names.remove_prefix(end + 1);
  }
}

} // namespace tileweave

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_say(void *, const TVMFFIAny *args, int32_t count,
                                                TVMFFIAny *) {
  TVM_FFI_SAFE_CALL_BEGIN();
  tileweave::Say({reinterpret_cast<const tvm::ffi::AnyView *>(args), count});
  TVM_FFI_SAFE_CALL_END();
}

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_bind(void *, const TVMFFIAny *args, int32_t count,
                                                 TVMFFIAny *result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  tileweave::Bind({reinterpret_cast<const tvm::ffi::AnyView *>(args), count},
                  reinterpret_cast<tvm::ffi::Any *>(result));
  TVM_FFI_SAFE_CALL_END();
}
