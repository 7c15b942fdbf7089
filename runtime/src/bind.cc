/*!
 * What a program asks its host for at each launch, answered without Python.
 *
 * See passes/tile/bind_runtime.py for who asks, runtime/kernel/host_functions.py for who says the
 * values.
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

/*! \brief From now on these are the values by name, and `otherwise` is asked for others. */
void Say(ffi::Function otherwise, ffi::Map<ffi::String, int64_t> values) {
  Answers &answers = TheAnswers();
  answers.otherwise = std::move(otherwise);
  answers.values.clear();
  for (const auto &[name, value] : values)
    answers.values.emplace_back(name, value);
}

/*! \brief Write the values of `names`, parted by commas, to slots on the host's stack. */
void Bind(void *slots, ffi::String given) {
  const Answers &answers = TheAnswers();
  auto *slot = static_cast<TVMFFIAny *>(slots);
  std::string_view names(given.data(), given.size());
  while (true) {
    size_t end = names.find(',');
    const int64_t *value = answers.Of(names.substr(0, end));
    if (value == nullptr) {
      answers.otherwise(slots, given);
      return;
    }
    (slot++)->v_int64 = *value;
    if (end == std::string_view::npos)
      return;
    names.remove_prefix(end + 1);
  }
}

} // namespace tileweave

TVM_FFI_DLL_EXPORT_TYPED_FUNC(say, tileweave::Say);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind, tileweave::Bind);
