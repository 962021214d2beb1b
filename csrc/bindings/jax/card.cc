#include "card.h"

#include <dlfcn.h>

#include <cstddef>
#include <string>

#include "call.h"

namespace horoplug::jax {
namespace {

// Throws what a function of XLA's has failed with.
void check(const xla::Api& api, xla::Error* error, const std::string& what) {
  if (error == nullptr) return;
  xla::ErrorMessageArgs message{sizeof message, nullptr, error, nullptr};
  api.error_message(&message);
  const std::string text =
      what + ": " + (message.message != nullptr ? message.message : "no reason");
  xla::ErrorDestroyArgs destroyed{sizeof destroyed, nullptr, error};
  api.error_destroy(&destroyed);
  throw Failure(xla::kInternal, text);
}

// For an XLA that does not say: the device of the context in which it calls.
std::int32_t current_device(const std::string& subject) {
  using GetDevice = int (*)(int*);
  static const auto get_device = [] {
    // XLA has loaded it, maybe for itself alone.
    void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver == nullptr ? nullptr
                             : reinterpret_cast<GetDevice>(::dlsym(driver, "cuCtxGetDevice"));
  }();
  int device = 0;
  const int result = get_device == nullptr ? -1 : get_device(&device);
  if (result != 0) {
    throw Failure(xla::kInternal, subject + ": which GPU XLA uses is unknown (cuCtxGetDevice: " +
                                      std::to_string(result) + "); use a newer jaxlib");
  }
  return device;
}

}  // namespace

CardPlace card_place(const xla::CallFrame& frame, const std::string& subject) {
  const xla::Api& api = *frame.api;
  xla::StreamArgs stream{sizeof stream, nullptr, frame.context, nullptr};
  check(api, api.stream(&stream), subject + ": XLA gives no stream");
  constexpr std::size_t kWithOrdinal = offsetof(xla::Api, ordinal) + sizeof api.ordinal;
  if (api.struct_size < kWithOrdinal) return {current_device(subject), stream.stream};
  xla::OrdinalArgs device{sizeof device, nullptr, frame.context, 0};
  check(api, api.ordinal(&device), subject + ": XLA gives no device");
  return {device.ordinal, stream.stream};
}

}  // namespace horoplug::jax
