#include "prepared_operations.h"

#include <algorithm>
#include <array>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace horoplug::bindings {
namespace {

// More names than a model has tensors. A program that makes names for each step would fill the
// memory otherwise.
constexpr std::size_t kMost = 1 << 14;

std::span<const hp_tensor> tensors_of(const hp_submission& submission) {
  return {submission.tensors, static_cast<std::size_t>(submission.tensor_count)};
}

std::span<const std::int64_t> shape_of(const hp_tensor& tensor) {
  return {tensor.shape, static_cast<std::size_t>(tensor.ndim)};
}

std::string_view layout_of(const hp_submission& submission) {
  return submission.layout == nullptr ? "" : submission.layout;
}

// Calls start(instance) with the memory of a submission.
template <typename Start>
hp_status with_instance(const hp_prepared* prepared, const hp_submission& submission,
                        Start&& start) {
  constexpr std::size_t kFew = 8;
  const auto tensors = tensors_of(submission);
  std::array<const void*, kFew> few_inputs;
  std::array<void*, kFew> few_outputs;
  const bool are_few = tensors.size() <= kFew;
  std::vector<const void*> inputs(are_few ? 0 : tensors.size());
  std::vector<void*> outputs(inputs.size());
  hp_instance instance = {};
  const void** const from = are_few ? few_inputs.data() : inputs.data();
  void** const to = are_few ? few_outputs.data() : outputs.data();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    from[i] = tensors[i].input;
    to[i] = tensors[i].output;
  }
  instance.struct_size = sizeof instance;
  instance.prepared = prepared;
  instance.inputs = from;
  instance.outputs = to;
  instance.stream = submission.stream;
  instance.pool_thread = submission.pool_thread;
  return start(instance);
}

}  // namespace

struct PreparedOperations::Entry {
  explicit Entry(const hp_submission& of) : submission(of), layout(layout_of(of)) {
    for (const hp_tensor& tensor : tensors_of(of)) {
      shapes.emplace_back(shape_of(tensor).begin(), shape_of(tensor).end());
    }
  }
  ~Entry() {
    if (prepared != nullptr) hp_prepared_free(prepared);
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  bool fits(const hp_submission& other) const {
    const auto properties = [](const hp_submission& s) {
      return std::tuple(s.op, s.dtype, s.reduce_op, s.root, s.device, s.process_set, s.prescale,
                        s.postscale, s.wire_dtype, s.tag);
    };
    const auto same_shape = [](const std::vector<std::int64_t>& shape, const hp_tensor& tensor) {
      return std::ranges::equal(shape, shape_of(tensor));
    };
    return properties(submission) == properties(other) && layout == layout_of(other) &&
           std::ranges::equal(shapes, tensors_of(other), same_shape);
  }

  hp_prepared* prepared = nullptr;
  const hp_submission submission;  // without what it points to
  const std::string layout;
  std::vector<std::vector<std::int64_t>> shapes;
};

std::shared_ptr<const PreparedOperations::Entry> PreparedOperations::find(
    hp_engine* engine, const hp_submission& submission) {
  if (submission.name == nullptr || submission.split_count > 0) return nullptr;
  const std::string_view name = submission.name;
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(name);
  if (found != known_.end() && found->second->fits(submission)) return found->second;
  const auto made = std::make_shared<Entry>(submission);
  // What is wrong with it, the submission itself says.
  if (hp_prepare(engine, &submission, &made->prepared) != HP_OK) return nullptr;
  if (known_.size() >= kMost) known_.clear();
  known_.insert_or_assign(std::string(name), made);
  return made;
}

hp_status PreparedOperations::submit(hp_engine* engine, const hp_submission& submission,
                                     hp_handle* handle) {
  const auto known = find(engine, submission);
  if (!known) return hp_submit(engine, &submission, handle);
  std::int32_t accepted = 0;
  return with_instance(known->prepared, submission, [&](const hp_instance& instance) {
    return hp_start(engine, &instance, 1, handle, &accepted);
  });
}

hp_status PreparedOperations::perform(hp_engine* engine, const hp_submission& submission,
                                      hp_handle* handle) {
  const auto known = find(engine, submission);
  if (!known) return hp_perform(engine, &submission, -1, handle);
  return with_instance(known->prepared, submission, [&](const hp_instance& instance) {
    return hp_start_and_wait(engine, &instance, -1, handle);
  });
}

void PreparedOperations::clear() {
  const std::lock_guard lock(mutex_);
  known_.clear();
}

}  // namespace horoplug::bindings
