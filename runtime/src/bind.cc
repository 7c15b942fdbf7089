/*!
 * Bind the values of a session at each launch of a program, without Python.
 *
 * passes/tile/bind_runtime.py inserts the calls; runtime/kernel/host_functions.py sets the values.
 */
#include <tvm/ffi/tvm_ffi.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tileweave {

namespace ffi = tvm::ffi;

/*! \brief Values of a session by name. */
struct SessionValues {
  std::vector<std::pair<std::string, int64_t>> values;
  std::atomic<bool> is_open{true};

  const int64_t *Find(std::string_view name) const {
    for (const auto &[key, value] : values) {
      if (key == name)
        return &value;
    }
    return nullptr;
  }
};

/*! \brief Session of launches of threads that have bound none; null if there is none. */
std::atomic<const SessionValues *> default_values{nullptr};
/*! \brief Session of this thread's launches; null if it has bound none. */
thread_local const SessionValues *thread_values = nullptr;

/*! \brief Python function that binds names without a value here, or raises.
 *
 * Never destroyed: Python owns it and ends before static variables do.
 */
ffi::Function &Fallback() {
  static auto *fallback = new ffi::Function;
  return *fallback;
}

/*! \brief Open a session with these values and return its handle.
 *
 * Its values are never destroyed, because another thread may have bound them.
 */
int64_t OpenSession(ffi::Map<ffi::String, int64_t> values) {
  auto *session = new SessionValues;
  for (const auto &[name, value] : values)
    session->values.emplace_back(name, value);
  return reinterpret_cast<int64_t>(session);
}

/*! \brief Close a session: threads that have bound it use the default session. */
void CloseSession(int64_t handle) { reinterpret_cast<SessionValues *>(handle)->is_open = false; }

/*! \brief Bind a session to the later launches of this thread. */
void BindSession(int64_t handle) {
  thread_values = reinterpret_cast<const SessionValues *>(handle);
}

/*! \brief Set the default session, 0 for none; `fallback` binds what it has no value for. */
void SetDefaultSession(ffi::Function fallback, int64_t handle) {
  Fallback() = std::move(fallback);
  default_values = reinterpret_cast<const SessionValues *>(handle);
}

/*! \brief Write the values of `names`, separated by commas, to slots on the host's stack. */
void Bind(void *slots, ffi::String list) {
  const SessionValues *session = thread_values;
  if (session == nullptr || !session->is_open)
    session = default_values;
  auto *slot = static_cast<TVMFFIAny *>(slots);
  std::string_view names(list.data(), list.size());
  while (true) {
    size_t end = names.find(',');
    const int64_t *value = session == nullptr ? nullptr : session->Find(names.substr(0, end));
    if (value == nullptr) {
      Fallback()(slots, list);
      return;
    }
    (slot++)->v_int64 = *value;
    if (end == std::string_view::npos)
      return;
    names.remove_prefix(end + 1);
  }
}

} // namespace tileweave

TVM_FFI_DLL_EXPORT_TYPED_FUNC(open_session, tileweave::OpenSession);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(close_session, tileweave::CloseSession);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind_session, tileweave::BindSession);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_default_session, tileweave::SetDefaultSession);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind, tileweave::Bind);
