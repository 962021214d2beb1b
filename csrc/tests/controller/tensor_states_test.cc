// What wire formats keep for each tensor: only completed batches count, and states can be reset,
// saved and loaded.
#include "controller/state/tensor_states.h"

#include <doctest/doctest.h>

#include "controller/state/members.h"

using namespace horoplug;

namespace {

// One batch with one tensor, which leaves `value` in each element.
void run(TensorStates& states, const std::string& name, std::size_t elements, float value) {
  std::vector<TensorStates::Update> updates;
  updates.push_back(states.begin(name, 0, elements));
  std::fill(updates.back().after->begin(), updates.back().after->end(), value);
  states.complete(std::move(updates));
}

// The first element that the next batch reads; -1: none.
float next(TensorStates& states, const std::string& name, std::size_t elements) {
  const TensorStates::Update update = states.begin(name, 0, elements);
  return update.before ? update.before->front() : -1;
}

}  // namespace

TEST_CASE("a batch reads what the last completed batch has left of the same tensor") {
  TensorStates states;
  CHECK(next(states, "a", 3) == -1);
  run(states, "a", 3, 7);
  run(states, "b", 2, 8);
  CHECK(next(states, "a", 3) == 7);
  CHECK(next(states, "b", 2) == 8);
  CHECK(next(states, "a", 4) == -1);
  CHECK(!states.begin("a", 1, 3).before);
}

TEST_CASE("a batch that does not complete leaves nothing") {
  TensorStates states;
  run(states, "a", 3, 7);
  {
    const TensorStates::Update withdrawn = states.begin("a", 0, 3);
    withdrawn.after->front() = 9;
  }
  CHECK(next(states, "a", 3) == 7);
}

TEST_CASE("a batch that runs meanwhile does not undo a reset") {
  TensorStates states;
  run(states, "a", 3, 7);
  std::vector<TensorStates::Update> updates;
  updates.push_back(states.begin("a", 0, 3));
  states.reset();
  CHECK(updates.front().before->front() == 7);
  states.complete(std::move(updates));
  CHECK(next(states, "a", 3) == -1);
}

TEST_CASE("states are saved and loaded, and what is malformed changes nothing") {
  TensorStates states;
  run(states, "a", 3, 7);
  run(states, "b", 2, 8);
  const Bytes saved = states.save();
  TensorStates others;
  run(others, "c", 1, 1);
  others.load(saved);
  CHECK(next(others, "a", 3) == 7);
  CHECK(next(others, "b", 2) == 8);
  CHECK(next(others, "c", 1) == -1);
  CHECK(others.save() == saved);
  for (std::size_t length = 0; length < saved.size(); ++length) {
    CHECK_THROWS_AS(states.load(std::span(saved).first(length)), WireError);
  }
  CHECK(states.save() == saved);
}

TEST_CASE("states end with their process set") {
  MembersPtr members = make_members(1, {0, 1}, 0);
  const std::weak_ptr<TensorStates> states = members->states;
  CHECK(make_members(1, {0, 1}, 0)->states != members->states);
  members.reset();
  CHECK(states.expired());
}
