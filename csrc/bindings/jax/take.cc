#include "take.h"

#include "call.h"
#include "card.h"
#include "tickets.h"

namespace horoplug::jax {

void take_results(const xla::CallFrame& frame) {
  const Attributes attributes(frame.attributes);
  const Ended ended = tickets().take(attributes.integer("ticket"));
  const CardPlace place =
      attributes.integer("on_card") != 0 ? card_place(frame, "an operation") : CardPlace{};
  const std::vector<Tensor> outputs = tensors_of(frame.results);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const hp_tensor_result result = ended.result(i);
    if (static_cast<std::size_t>(result.bytes) != outputs[i].bytes()) {
      throw Failure(xla::kInternal, "an array of another size than the result");
    }
    const auto index = static_cast<std::int32_t>(i);
    check(hp_stream_copy(ended.engine(), ended.handle(), index, outputs[i].data, place.stream));
    if (result.device < 0 || result.owned == 0) continue;
    // The core's memory is given back behind the copy.
    hp_device_memory* memory = nullptr;
    check(hp_take_device(ended.engine(), ended.handle(), index, place.stream, &memory));
    hp_device_memory_free(memory);
  }
}

}  // namespace horoplug::jax
