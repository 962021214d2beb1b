#include "gpu_stream.h"

#include <dlfcn.h>

#include <cstddef>

#include "ffi_frame.h"

namespace horoplug::jax {
namespace {

// Throws the failure of an XLA function.
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

// For XLA versions that do not tell the device: that of the current CUDA context.
std::int32_t current_device(const std::string& subject) {
  using GetDevice = int (*)(int*);
  static const auto get_device = [] {
    // XLA has loaded the driver, possibly with RTLD_LOCAL.
    void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver == nullptr ? nullptr
                             : reinterpret_cast<GetDevice>(::dlsym(driver, "cuCtxGetDevice"));
  }();
  int device = 0;
  const int result = get_device == nullptr ? -1 : get_device(&device);
  if (result != 0) {
    throw Failure(xla::kInternal,
                  subject + ": the GPU that XLA uses cannot be determined (cuCtxGetDevice: " +
                      std::to_string(result) + "); use a newer jaxlib");
  }
  return device;
}

}  // namespace

GpuStream gpu_stream_of(const xla::CallFrame& frame, const std::string& subject) {
  const xla::Api& api = *frame.api;
  xla::StreamArgs stream{sizeof stream, nullptr, frame.context, nullptr};
  check(api, api.stream(&stream), subject + ": XLA does not provide a stream");
  constexpr std::size_t kWithOrdinal = offsetof(xla::Api, ordinal) + sizeof api.ordinal;
  if (api.struct_size < kWithOrdinal) return {current_device(subject), stream.stream};
  xla::OrdinalArgs device{sizeof device, nullptr, frame.context, 0};
  check(api, api.ordinal(&device), subject + ": XLA does not provide the device");
  return {device.ordinal, stream.stream};
}

}  // namespace horoplug::jax
