// The calls of one program run one after the other, in the order in which the program's Python code
// makes them, on every rank: a token orders each call after the one before it, and the first call
// after the last one of the program that was dispatched before (see horoplug/jax/order.py). So no
// two ranks can wait for later calls of each other, and a call may block XLA's thread while it
// waits. This is the fastest way, and the core knows which ranks are blocked: ranks that wait for
// each other because their programs differ get an error. XLA's futures, with which a call need not
// block its thread, would not allow more concurrency: the CPU client starts no program before the
// previous one has ended.
//
// On a GPU, a call waits until the ranks have agreed and the operation has been enqueued in the
// core's stream. XLA's stream then waits for that stream; no thread waits for either.
#include "collective_call.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

namespace horoplug::jax {
namespace {

std::string describe(const std::vector<std::int64_t>& counts) {
  std::string text = "[";
  for (const std::int64_t count : counts) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(count);
  }
  return text + "]";
}

}  // namespace

CollectiveCall::CollectiveCall(const xla::CallFrame& frame)
    : attributes_(frame.attributes),
      eager_call_(attributes_.integer("eager_call")),
      lease_(bindings::engine_slot().lease()),
      op_(attributes_.integer("operation")),
      process_set_(attributes_.integer("process_set")),
      name_(attributes_.text("name")),
      splits_(attributes_.integers("splits")),
      equal_rows_(attributes_.integer("equal_rows") != 0),
      inputs_(tensors_of(frame.arguments)),
      outputs_(tensors_of(frame.results)) {
  if (!lease_) {
    throw Failure(xla::kFailedPrecondition, "Horovod has not been initialized; use hvd.init()");
  }
  if (inputs_.empty() || outputs_.size() < inputs_.size()) {
    throw Failure(xla::kInternal, "the call has no arrays");
  }
  if (eager_call_ != 0) {
    EagerCalls::Request request = eager_calls().request(eager_call_);
    name_ = std::move(request.name);
    splits_ = std::move(request.splits);
  }
  if (attributes_.integer("on_gpu") != 0) gpu_ = gpu_stream_of(frame, subject());
  check_position();
}

// Shapes in a compiled program may depend on the rank and on the size of the process set.
void CollectiveCall::check_position() const {
  const std::int32_t size = attributes_.integer("size");
  const std::int32_t rank = attributes_.integer("rank");
  if (size == 0) return;
  std::int32_t size_now = 0;
  std::int32_t rank_now = 0;
  check(hp_process_set_size(lease_->engine, process_set_, &size_now, &rank_now));
  if (size == size_now && rank == rank_now) return;
  throw Failure(xla::kFailedPrecondition,
                "this program was compiled for rank " + std::to_string(rank) + " of " +
                    std::to_string(size) + ", but is rank " + std::to_string(rank_now) + " of " +
                    std::to_string(size_now) +
                    " now; call jax.clear_caches() after hvd.init() so that it is compiled again");
}

std::string CollectiveCall::subject() const {
  if (!name_.empty()) return "'" + name_ + "'";
  return hp_op_name(op_);
}

// The memory of XLA's output if the core can write to it directly. Null if the output shape depends
// on the other ranks.
void* CollectiveCall::output_of(std::size_t index) const {
  if (rows_unknown()) return nullptr;
  std::vector<std::int64_t> shape = inputs_[index].shape;
  if (op_ == HP_REDUCESCATTER && !shape.empty()) {
    const std::int64_t size = std::max(attributes_.integer("size"), 1);
    const std::int64_t rows = std::exchange(shape.front(), shape.front() / size);
    if (attributes_.integer("rank") < rows % size) ++shape.front();
  }
  if (shape != outputs_[index].shape) {
    throw Failure(xla::kInternal,
                  "the output of the call has another shape than follows from its input");
  }
  return outputs_[index].data;
}

hp_submission CollectiveCall::submission() {
  described_.reserve(inputs_.size());
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    Tensor& input = inputs_[i];
    if (eager_call_ != 0 && !splits_.empty() && !input.shape.empty()) {
      // Rows beyond the splits are not sent. (A compiled program has removed them already.)
      const auto sent = std::accumulate(splits_.begin(), splits_.end(), std::int64_t{0});
      input.shape.front() = std::min(input.shape.front(), sent);
    }
    described_.push_back({input.data, output_of(i), input.shape.data(),
                          static_cast<std::int32_t>(input.shape.size()), 0});
  }
  hp_submission made{};
  made.struct_size = sizeof made;
  made.pool_thread = 1;
  made.op = op_;
  made.dtype = inputs_.front().dtype;
  made.reduce_op = attributes_.integer("reduce_op");
  made.root = attributes_.integer("root");
  made.device = gpu_.device;
  made.stream = gpu_.stream;
  made.process_set = process_set_;
  made.prescale = attributes_.number("prescale");
  made.postscale = attributes_.number("postscale");
  made.wire_dtype = attributes_.integer("wire_dtype");
  made.name = name_.empty() ? nullptr : name_.c_str();
  made.tensors = described_.data();
  made.tensor_count = static_cast<std::int32_t>(described_.size());
  made.splits = splits_.data();
  made.split_count = static_cast<std::int32_t>(splits_.size());
  return made;
}

void CollectiveCall::perform() {
  const hp_submission made = submission();
  const hp_status status =
      bindings::engine_slot().prepared().perform(lease_->engine, made, -1, false, &handle_);
  if (handle_ != 0) return finish();
  check(status, subject());
}

void CollectiveCall::finish() {
  CompletedOperation operation(std::move(lease_), handle_);
  check(hp_poll(operation.engine(), handle_));
  // Before anything else can fail: XLA reuses the memory.
  if (is_on_gpu()) check(hp_stream_wait(operation.engine(), handle_, gpu_.stream), subject());
  if (!rows_unknown()) return;
  if (eager_call_ != 0) return keep(std::move(operation));
  for (std::size_t i = 0; i < inputs_.size(); ++i) copy_result(operation, i);
}

void CollectiveCall::copy_result(const CompletedOperation& operation, std::size_t index) {
  const hp_tensor_result result = operation.result(index);
  const Tensor& output = outputs_[index];
  const std::vector<std::int64_t> counts(result.row_counts,
                                         result.row_counts + result.row_count_size);
  // A difference between the ranks is an error on all of them, also where the size is as expected.
  const bool differ = equal_rows_ && std::adjacent_find(counts.begin(), counts.end(),
                                                        std::not_equal_to<>()) != counts.end();
  if (differ || static_cast<std::size_t>(result.bytes) != output.bytes()) {
    throw Failure(
        xla::kFailedPrecondition,
        subject() +
            " inside of jax.jit needs the same number of rows on every rank: it was compiled for " +
            std::to_string(output.rows()) + " rows of output and got " +
            std::to_string(result.rows) + (counts.empty() ? "" : ", by rank " + describe(counts)) +
            "; call it outside of jax.jit, or pad the arrays");
  }
  if (is_on_gpu()) {
    check(hp_stream_copy(operation.engine(), handle_, static_cast<std::int32_t>(index), output.data,
                         gpu_.stream),
          subject());
  } else if (result.bytes > 0) {
    std::memcpy(output.data, result.data, output.bytes());
  }
}

// A second program, which knows the shapes, copies the results to XLA's arrays.
void CollectiveCall::keep(CompletedOperation operation) {
  std::vector<std::vector<std::int64_t>> row_counts;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const hp_tensor_result result = operation.result(i);
    row_counts.emplace_back(result.row_counts, result.row_counts + result.row_count_size);
  }
  eager_calls().keep(eager_call_, std::move(operation), std::move(row_counts));
}

}  // namespace horoplug::jax
