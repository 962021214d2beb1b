#include "prepared_operations.h"

#include <array>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

namespace horoplug::bindings {
namespace {

// More operations than a step has. A program that makes names for each step would fill the memory
// otherwise.
constexpr std::size_t kMost = 1 << 14;

std::uint64_t hash_of(const hp_submission& submission) {
  std::uint64_t hash =
      std::hash<std::string_view>{}(submission.name == nullptr ? "" : submission.name);
  const auto add = [&](std::int64_t number) {
    hash = (hash ^ static_cast<std::uint64_t>(number)) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
  };
  for (const std::int64_t number : {submission.op, submission.dtype, submission.reduce_op,
                                    submission.root, submission.process_set}) {
    add(number);
  }
  for (const hp_tensor& tensor : KeptSubmission::tensors_of(submission)) {
    add(tensor.ndim);
    for (const std::int64_t dimension : KeptSubmission::shape_of(tensor)) add(dimension);
  }
  return hash;
}

// Calls start(instance) with the memory of a submission.
template <typename Start>
hp_status with_instance(const hp_prepared* prepared, const hp_submission& submission,
                        Start&& start) {
  constexpr std::size_t kFew = 8;
  const auto tensors = KeptSubmission::tensors_of(submission);
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
  explicit Entry(const hp_submission& of) : submission(of) {}
  ~Entry() {
    if (prepared != nullptr) hp_prepared_free(prepared);
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  const KeptSubmission submission;
  hp_prepared* prepared = nullptr;
};

std::shared_ptr<const PreparedOperations::Entry> PreparedOperations::find(
    hp_engine* engine, const hp_submission& submission) {
  if (submission.split_count > 0) return nullptr;
  const std::uint64_t hash = hash_of(submission);
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(hash);
  if (found != known_.end() && found->second->submission.fits(submission)) return found->second;
  const auto made = std::make_shared<Entry>(submission);
  // What is wrong with it, the submission itself says.
  if (hp_prepare(engine, &submission, &made->prepared) != HP_OK) return nullptr;
  if (known_.size() >= kMost) known_.clear();
  known_.insert_or_assign(hash, made);
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
                                      double timeout, bool keeps_handle, hp_handle* handle) {
  const auto known = find(engine, submission);
  if (!known) return hp_perform(engine, &submission, timeout, handle);
  return with_instance(known->prepared, submission, [&](hp_instance& instance) {
    instance.keeps_handle = keeps_handle ? 1 : 0;
    return hp_start_and_wait(engine, &instance, timeout, handle);
  });
}

void PreparedOperations::clear() {
  const std::lock_guard lock(mutex_);
  known_.clear();
}

}  // namespace horoplug::bindings
