// One operation, from XLA's buffers to the core and back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/job.h"
#include "call.h"
#include "card.h"
#include "tickets.h"

namespace horoplug::jax {

class Run {
 public:
  // Throws Failure.
  explicit Run(const xla::CallFrame& frame);

  // The whole of it, on this thread: on a card, until it is in order in XLA's stream. Throws
  // Failure.
  void perform();

 private:
  void check_place() const;
  void* given_output(std::size_t index) const;
  hp_submission submission();
  void finish();
  void collect(const Ended& ended, std::size_t index);
  void keep(Ended ended);
  std::string subject() const;
  // Whether the number of output rows is what the ranks decide.
  bool has_open_rows() const { return op_ == HP_ALLGATHER || op_ == HP_ALLTOALL; }
  bool is_on_card() const { return place_.device >= 0; }

  const Attributes attributes_;
  const std::int32_t ticket_;  // 0: none
  bindings::Job::Loan job_;
  const std::int32_t op_;
  const std::int32_t process_set_;
  std::string name_;
  std::vector<std::int64_t> splits_;
  const bool is_even_;  // of rows, every rank has as many
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  CardPlace place_;
  std::vector<hp_tensor> described_;
  hp_handle handle_ = 0;
};

}  // namespace horoplug::jax
