/*!
 * Bind the values of a session at each launch of a program, without Python.
 *
 * passes/tile/bind_runtime.py inserts the calls; runtime/kernel/host_functions.py sets the values.
 */
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tileweave {

namespace ffi = tvm::ffi;

/*! \brief Values of the current session by name; empty without a session. */
struct SessionValues {
  std::vector<std::pair<std::string, int64_t>> values;
  /*! \brief Python function that binds names without a value here, or raises. */
  ffi::Function fallback;

  const int64_t *Find(std::string_view name) const {
    for (const auto &[key, value] : values) {
      if (key == name)
        return &value;
    }
    return nullptr;
  }
};

/*! \brief Never destroyed: Python owns `fallback` and ends before static variables do. */
SessionValues &CurrentValues() {
  static auto *current = new SessionValues;
  return *current;
}

/*! \brief Bind these values at all later launches; `fallback` binds all other names. */
void BindSession(ffi::Function fallback, ffi::Map<ffi::String, int64_t> values) {
  SessionValues &current = CurrentValues();
  current.fallback = std::move(fallback);
  current.values.clear();
  for (const auto &[name, value] : values)
    current.values.emplace_back(name, value);
}

/*! \brief Write the values of `names`, separated by commas, to slots on the host's stack. */
void Bind(void *slots, ffi::String list) {
  const SessionValues &current = CurrentValues();
  auto *slot = static_cast<TVMFFIAny *>(slots);
  std::string_view names(list.data(), list.size());
  while (true) {
    size_t end = names.find(',');
    const int64_t *value = current.Find(names.substr(0, end));
    if (value == nullptr) {
      current.fallback(slots, list);
      return;
    }
    (slot++)->v_int64 = *value;
    if (end == std::string_view::npos)
      return;
    names.remove_prefix(end + 1);
  }
}

} // namespace tileweave

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind_session, tileweave::BindSession);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind, tileweave::Bind);
