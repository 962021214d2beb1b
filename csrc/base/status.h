// Failures are exceptions inside the core, and Status values where they are stored or returned to a
// caller.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "horoplug/horoplug.h"

namespace horoplug {

struct Status {
  hp_status code = HP_OK;
  std::string message;

  bool ok() const { return code == HP_OK; }
};

class Error : public std::runtime_error {
 public:
  Error(hp_status code, const std::string& message) : std::runtime_error(message), code_(code) {}

  hp_status code() const { return code_; }
  Status status() const { return {code_, what()}; }

 private:
  hp_status code_;
};

// A failure that one other rank caused: its link broke, it left, or it sent invalid data.
class PeerError : public Error {
 public:
  PeerError(hp_status code, int rank, const std::string& message)
      : Error(code, message), rank_(rank) {}

  int rank() const { return rank_; }

 private:
  int rank_;
};

// Formats ranks for messages: "rank 3", "ranks 0-2, 5". If there are more than `limit` ranges, the
// rest is counted instead of listed.
std::string describe_ranks(std::vector<int> ranks, std::size_t limit = 16);

}  // namespace horoplug
