#include "engine/operations/operation.h"

#include <bit>
#include <cstdlib>

namespace horoplug {

void Deleter::operator()(void* data) const {
  if (!device) return std::free(data);
  try {
    device->release(std::bit_cast<CUdeviceptr>(data), stream);
  } catch (const Error&) {
    // The GPU has failed, and its memory is gone with it. There may be no log any more either.
  }
}

const TensorOutcome& Operation::outcome(int index) const {
  if (index < 0 || static_cast<std::size_t>(index) >= outcomes.size()) {
    throw Error(HP_INVALID_ARGUMENT, "the operation has no tensor " + std::to_string(index));
  }
  return outcomes[static_cast<std::size_t>(index)];
}

std::string Operation::describe() const {
  const std::string& name = this->name();
  const std::string kind = op_kind_name(signature().op);
  // The gather of the parts of a sparse tensor is called an allreduce, which it is for its caller.
  const bool is_of_parts = !signature().layout.empty() &&
                           name.starts_with(op_kind_name(OpKind::kAllreduce) + std::string("."));
  const bool says_kind = is_of_parts || name == kind || name.starts_with(kind + ".");
  std::string text = name.empty() ? kind : says_kind ? "'" + name + "'" : kind + " '" + name + "'";
  if (members->set != 0) text += " (process set " + std::to_string(members->set) + ")";
  return text;
}

}  // namespace horoplug
