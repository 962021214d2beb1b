#include "controller/state/tensor_states.h"

#include <utility>

namespace horoplug {

TensorStates::Update TensorStates::begin(const std::string& name, std::size_t index,
                                         std::size_t elements) {
  Update update{name + '#' + std::to_string(index), nullptr, std::make_shared<Values>(elements)};
  const std::lock_guard lock(mutex_);
  update.edition = edition_;
  const auto found = states_.find(update.key);
  if (found != states_.end() && found->second->size() == elements) update.before = found->second;
  return update;
}

void TensorStates::complete(std::vector<Update> updates) {
  const std::lock_guard lock(mutex_);
  for (Update& update : updates) {
    if (update.edition == edition_) states_[std::move(update.key)] = std::move(update.after);
  }
}

void TensorStates::reset() {
  const std::lock_guard lock(mutex_);
  states_.clear();
  ++edition_;
}

Bytes TensorStates::save() const {
  Writer writer;
  const std::lock_guard lock(mutex_);
  writer.put_varint(states_.size());
  for (const auto& [key, values] : states_) {
    writer.put_string(key);
    writer.put_bytes(std::as_bytes(std::span(*values)));
  }
  return writer.take();
}

void TensorStates::load(std::span<const std::byte> saved) {
  Reader reader(saved);
  std::map<std::string, std::shared_ptr<const Values>> states;
  for (std::size_t left = reader.get_count(2); left > 0; --left) {
    std::string key = reader.get_string();
    const Bytes bytes = reader.get_bytes();
    if (bytes.size() % sizeof(float) != 0) throw WireError("part of a number");
    auto values = std::make_shared<Values>(bytes.size() / sizeof(float));
    if (!bytes.empty()) std::memcpy(values->data(), bytes.data(), bytes.size());
    states.insert_or_assign(std::move(key), std::move(values));
  }
  reader.expect_end();
  const std::lock_guard lock(mutex_);
  states_ = std::move(states);
  ++edition_;
}

}  // namespace horoplug
