#include "copy_results.h"

#include "eager_calls.h"
#include "ffi_frame.h"
#include "gpu_stream.h"

namespace horoplug::jax {

void copy_results(const xla::CallFrame& frame) {
  const Attributes attributes(frame.attributes);
  const CompletedOperation operation = eager_calls().take(attributes.integer("eager_call"));
  const GpuStream gpu =
      attributes.integer("on_gpu") != 0 ? gpu_stream_of(frame, "an operation") : GpuStream{};
  const std::vector<Tensor> outputs = tensors_of(frame.results);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const hp_tensor_result result = operation.result(i);
    if (static_cast<std::size_t>(result.bytes) != outputs[i].bytes()) {
      throw Failure(xla::kInternal, "the output array and the result have different sizes");
    }
    const auto index = static_cast<std::int32_t>(i);
    check(
        hp_stream_copy(operation.engine(), operation.handle(), index, outputs[i].data, gpu.stream));
    if (result.device < 0 || result.owned == 0) continue;
    // Frees the core's memory in stream order, after the copy.
    hp_device_memory* memory = nullptr;
    check(hp_take_device(operation.engine(), operation.handle(), index, gpu.stream, &memory));
    hp_device_memory_free(memory);
  }
}

}  // namespace horoplug::jax
