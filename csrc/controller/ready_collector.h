// What has become ready in the subtree of a rank that is not the root, until the rank tells its
// parent in one message.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "controller/messages/messages.h"
#include "controller/state/name_table.h"
#include "controller/state/readiness.h"

namespace horoplug {

class ReadyCollector {
 public:
  // `names`: what the ranks know by an id. It must outlive the collector.
  explicit ReadyCollector(const NameTable& names) : names_(names) {}

  // An operation travels as its id if it has one and its signature is the one agreed on last.
  void add(ReadinessTable::Complete complete) {
    if (!complete.variants.empty()) {
      ready_.requests.push_back({std::move(complete.name), std::move(complete.variants)});
      return;
    }
    const auto id = names_.find(complete.name);
    if (id && compatible(names_.at(*id)->signature, complete.signature)) {
      ready_.ids.push_back(*id);
    } else {
      ready_.requests.push_back({std::move(complete.name), {{std::move(complete.signature), {}}}});
    }
  }

  bool empty() const { return ready_.ids.empty() && ready_.requests.empty(); }

  // The message with everything that was added since the last call.
  Bytes take_message(std::uint32_t set, std::uint32_t agreement) {
    std::sort(ready_.ids.begin(), ready_.ids.end());
    ready_.agreement = agreement;
    Bytes message = encode(set, ready_);
    clear();
    return message;
  }

  // Forgets what was added.
  void clear() {
    ready_.ids.clear();
    ready_.requests.clear();
  }

 private:
  const NameTable& names_;
  Ready ready_;
};

}  // namespace horoplug
