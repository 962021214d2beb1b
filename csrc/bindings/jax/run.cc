// Calls of one program run one after the other, in the order in which the program's Python code
// makes them, on every rank: a token ties each to the one before it, and the first one to the last
// of the program that was dispatched before (see horoplug/jax/order.py). So no two ranks can wait
// for each other's later calls, and a call may hold XLA's thread while it waits. That is the
// fastest way, and the core sees who is blocked: ranks that do wait for each other, because their
// programs differ, get an error. XLA's futures, with which a call need not hold its thread, would
// change nothing else: the CPU client begins no program before the last one has ended.
//
// On a card, a call waits until the ranks have agreed and the operation is in order in the core's
// stream. XLA's stream then waits for that one, the host for neither.
#include "run.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

namespace horoplug::jax {
namespace {

using bindings::job;

std::string describe(const std::vector<std::int64_t>& counts) {
  std::string text = "[";
  for (const std::int64_t count : counts) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(count);
  }
  return text + "]";
}

}  // namespace

Run::Run(const xla::CallFrame& frame)
    : attributes_(frame.attributes),
      ticket_(attributes_.integer("ticket")),
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
  if (ticket_ != 0) {
    Tickets::Request request = tickets().request(ticket_);
    name_ = std::move(request.name);
    splits_ = std::move(request.splits);
  }
  if (attributes_.integer("on_card") != 0) place_ = card_place(frame, subject());
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

std::string Run::subject() const {
  if (!name_.empty()) return "'" + name_ + "'";
  constexpr const char* kKinds[] = {"allreduce", "allgather", "broadcast", "alltoall",
                                    "reducescatter"};
  const auto kind = static_cast<std::size_t>(op_);
  return kind < std::size(kKinds) ? kKinds[kind] : "an operation";
}

// XLA's output, if the core can write to it: its shape has been known all along.
void* Run::given_output(std::size_t index) const {
  if (has_open_rows()) return nullptr;
  std::vector<std::int64_t> shape = inputs_[index].shape;
  if (op_ == HP_REDUCESCATTER && !shape.empty()) {
    const std::int64_t size = std::max(attributes_.integer("size"), 1);
    const std::int64_t rows = std::exchange(shape.front(), shape.front() / size);
    if (attributes_.integer("place") < rows % size) ++shape.front();
  }
  if (shape != outputs_[index].shape) {
    throw Failure(xla::kInternal, "an output of another shape than its input makes it");
  }
  return outputs_[index].data;
}

hp_submission Run::submission() {
  described_.reserve(inputs_.size());
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    Tensor& input = inputs_[i];
    if (ticket_ != 0 && !splits_.empty() && !input.shape.empty()) {
      // Rows beyond the splits are sent nowhere. (A compiled program has cut them off.)
      const auto sent = std::accumulate(splits_.begin(), splits_.end(), std::int64_t{0});
      input.shape.front() = std::min(input.shape.front(), sent);
    }
    described_.push_back({input.data, given_output(i), input.shape.data(),
                          static_cast<std::int32_t>(input.shape.size()), 0});
  }
  hp_submission made{};
  made.struct_size = sizeof made;
  made.op = op_;
  made.dtype = inputs_.front().dtype;
  made.reduce_op = attributes_.integer("reduce_op");
  made.root = attributes_.integer("root");
  made.device = place_.device;
  made.stream = place_.stream;
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

void Run::perform() {
  const hp_submission made = submission();
  const hp_status status = hp_perform(job_->engine, &made, -1, &handle_);
  if (handle_ == 0) check(status, subject());
  finish();
}

// The operation has ended.
void Run::finish() {
  Ended ended(std::move(job_), handle_);
  check(hp_poll(ended.engine(), handle_));
  // Before anything else can fail: XLA will use the memory for other things.
  if (is_on_card()) check(hp_stream_wait(ended.engine(), handle_, place_.stream), subject());
  if (!has_open_rows()) return;
  if (ticket_ != 0) return keep(std::move(ended));
  for (std::size_t i = 0; i < inputs_.size(); ++i) collect(ended, i);
}

void Run::collect(const Ended& ended, std::size_t index) {
  const hp_tensor_result result = ended.result(index);
  const Tensor& output = outputs_[index];
  const std::vector<std::int64_t> counts(result.row_counts,
                                         result.row_counts + result.row_count_size);
  // If the ranks differ, it is an error on all of them, whatever each has expected.
  const bool differ = is_even_ && std::adjacent_find(counts.begin(), counts.end(),
                                                     std::not_equal_to<>()) != counts.end();
  if (differ || static_cast<std::size_t>(result.bytes) != output.bytes()) {
    throw Failure(xla::kFailedPrecondition,
                  subject() +
                      " inside of jax.jit needs as many rows on every rank: it was compiled for " +
                      std::to_string(output.rows()) + " rows of output and got " +
                      std::to_string(result.rows) +
                      (counts.empty() ? "" : ", from the ranks " + describe(counts)) +
                      "; call it outside of jax.jit, or pad");
  }
  if (is_on_card()) {
    check(hp_stream_copy(ended.engine(), handle_, static_cast<std::int32_t>(index), output.data,
                         place_.stream),
          subject());
  } else if (result.bytes > 0) {
    std::memcpy(output.data, result.data, output.bytes());
  }
}

// The results are brought to arrays by a call that knows their shapes.
void Run::keep(Ended ended) {
  std::vector<std::vector<std::int64_t>> row_counts;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const hp_tensor_result result = ended.result(i);
    row_counts.emplace_back(result.row_counts, result.row_counts + result.row_count_size);
  }
  tickets().keep(ticket_, std::move(ended), std::move(row_counts));
}

}  // namespace horoplug::jax
