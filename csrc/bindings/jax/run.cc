// The handler: from XLA's buffers to the core and back.
//
// Calls of one program run one after the other, in the order in which the program's Python code
// makes them, on every rank: a token ties each to the one before it, and the first one to the last
// of the program that was dispatched before (see horoplug/jax/order.py). So no two ranks can wait
// for each other's later calls, and a call may hold XLA's thread while it waits. That is the
// fastest way, and the core sees who is blocked: ranks that do wait for each other, because their
// programs differ, get an error. XLA's futures, with which a call need not hold its thread, would
// change nothing else: the CPU client begins no program before the last one has ended.
#include <algorithm>
#include <cstring>
#include <functional>

#include "../common/job.h"
#include "../common/operation.h"
#include "call.h"

namespace horoplug::jax {
namespace {

using bindings::job;
using bindings::Job;

std::string describe(const std::vector<std::int64_t>& counts) {
  std::string text = "[";
  for (const std::int64_t count : counts) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(count);
  }
  return text + "]";
}

// An error of XLA's; a null pointer if XLA takes none.
xla::Error* to_error(const xla::Api& api, const Failure& failure) {
  xla::ErrorCreateArgs args{sizeof args, nullptr, failure.what(), failure.code()};
  return api.error_create(&args);
}

// Runs `body`; returns how it failed, in XLA's terms. Nothing is thrown into its code.
template <typename Body>
xla::Error* guarded(const xla::Api& api, Body&& body) {
  try {
    body();
    return nullptr;
  } catch (const Failure& failure) {
    return to_error(api, failure);
  } catch (const std::exception& error) {
    return to_error(api, {xla::kInternal, error.what()});
  }
}

class Run {
 public:
  // Throws Failure.
  explicit Run(const xla::CallFrame& frame);

  // The whole of it, on this thread. Throws Failure.
  void perform();

 private:
  void check_place() const;
  hp_submission submission();
  void finish();
  void collect(std::size_t index);
  bool gives_rows() const {
    return op_ == HP_ALLGATHER || op_ == HP_ALLTOALL || op_ == HP_REDUCESCATTER;
  }

  const Attributes attributes_;
  Job::Loan job_;
  const std::int32_t op_;
  const std::int32_t process_set_;
  const std::string name_;
  const std::vector<std::int64_t> splits_;
  const bool is_even_;  // of rows, every rank has as many
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  std::vector<hp_tensor> described_;
  hp_handle handle_ = 0;
};

Run::Run(const xla::CallFrame& frame)
    : attributes_(frame.attributes),
      job_(job().borrow()),
      op_(attributes_.integer("operation")),
      process_set_(attributes_.integer("process_set")),
      name_(attributes_.text("name")),
      splits_(attributes_.integers("splits")),
      is_even_(attributes_.integer("is_even") != 0),
      inputs_(tensors_of(frame.arguments)),
      outputs_(tensors_of(frame.results)) {
  if (!job_) {
    throw Failure(xla::kFailedPrecondition, "Horovod has not been initialized; use hvd.init().");
  }
  if (inputs_.empty() || outputs_.size() < inputs_.size()) {
    throw Failure(xla::kInternal, "a call without arrays");
  }
  check_place();
}

// Shapes inside of a compiled program can depend on which rank of how many this is.
void Run::check_place() const {
  const std::int32_t size = attributes_.integer("size");
  const std::int32_t place = attributes_.integer("place");
  if (size == 0) return;
  std::int32_t size_now = 0;
  std::int32_t place_now = 0;
  check(hp_process_set_size(job_->engine, process_set_, &size_now, &place_now));
  if (size == size_now && place == place_now) return;
  throw Failure(xla::kFailedPrecondition,
                "this program was compiled for rank " + std::to_string(place) + " of " +
                    std::to_string(size) + ", but is rank " + std::to_string(place_now) + " of " +
                    std::to_string(size_now) +
                    " now; call jax.clear_caches() after hvd.init() so that it is compiled again");
}

hp_submission Run::submission() {
  described_.reserve(inputs_.size());
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const Tensor& input = inputs_[i];
    // The number of rows is what the ranks decide.
    const bool is_fixed = op_ == HP_ALLREDUCE || op_ == HP_BROADCAST;
    if (is_fixed && input.shape != outputs_[i].shape) {
      throw Failure(xla::kInternal, "an output of another shape than its input");
    }
    described_.push_back({input.data, is_fixed ? outputs_[i].data : nullptr, input.shape.data(),
                          static_cast<std::int32_t>(input.shape.size()), 0});
  }
  hp_submission made{};
  made.struct_size = sizeof made;
  made.op = op_;
  made.dtype = inputs_.front().dtype;
  made.reduce_op = attributes_.integer("reduce_op");
  made.root = attributes_.integer("root");
  made.device = -1;
  made.process_set = process_set_;
  made.prescale = attributes_.number("prescale");
  made.postscale = attributes_.number("postscale");
  made.name = name_.empty() ? nullptr : name_.c_str();
  made.tensors = described_.data();
  made.tensor_count = static_cast<std::int32_t>(described_.size());
  made.splits = splits_.data();
  made.split_count = static_cast<std::int32_t>(splits_.size());
  return made;
}

void Run::perform() {
  const hp_submission made = submission();
  const hp_status status = hp_perform(job_->engine, &made, -1, &handle_);
  if (handle_ == 0) check(status);
  finish();
}

// The operation has ended.
void Run::finish() {
  hp_engine* const engine = job_->engine;
  const bindings::Release release(engine, handle_);
  check(hp_poll(engine, handle_));
  if (!gives_rows()) return;
  for (std::size_t i = 0; i < inputs_.size(); ++i) collect(i);
}

void Run::collect(std::size_t index) {
  hp_tensor_result result{};
  result.struct_size = sizeof result;
  check(hp_result(job_->engine, handle_, static_cast<std::int32_t>(index), &result));
  const Tensor& output = outputs_[index];
  const std::vector<std::int64_t> counts(result.row_counts,
                                         result.row_counts + result.row_count_size);
  // If the ranks differ, it is an error on all of them, whatever each has expected.
  const bool differ = is_even_ && std::adjacent_find(counts.begin(), counts.end(),
                                                     std::not_equal_to<>()) != counts.end();
  if (differ || static_cast<std::size_t>(result.bytes) != output.bytes()) {
    throw Failure(xla::kFailedPrecondition,
                  (name_.empty() ? "an operation" : "'" + name_ + "'") +
                      " inside of jax.jit needs as many rows on every rank: it was compiled for " +
                      std::to_string(output.rows()) + " rows of output and got " +
                      std::to_string(result.rows) +
                      (counts.empty() ? "" : ", from the ranks " + describe(counts)) +
                      "; call it outside of jax.jit, or pad");
  }
  if (result.bytes > 0) std::memcpy(output.data, result.data, output.bytes());
}

bool takes_metadata(xla::CallFrame* frame) {
  for (xla::Extension* at = frame->extensions; at != nullptr; at = at->next) {
    if (at->type != xla::kExtensionMetadata) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(at)->metadata;
    // What is used here is in every version since the first that can be asked, so that this
    // library's is the one that the process has.
    metadata.api_version.major = frame->api != nullptr ? frame->api->api_version.major : 0;
    metadata.api_version.minor = frame->api != nullptr ? frame->api->api_version.minor : 1;
    metadata.traits = 0;
    return true;
  }
  return false;
}

}  // namespace
}  // namespace horoplug::jax

extern "C" __attribute__((visibility("default"))) horoplug::jax::xla::Error* horoplug_jax_run(
    horoplug::jax::xla::CallFrame* frame) {
  using namespace horoplug::jax;
  if (takes_metadata(frame)) return nullptr;
  return guarded(*frame->api, [&] { Run(*frame).perform(); });
}

// The engine to use from now on. With a null pointer: waits until the last one is no longer in use,
// after it has shut down.
extern "C" __attribute__((visibility("default"))) void horoplug_jax_use(hp_engine* engine) {
  horoplug::bindings::job().set({engine});
}
