// How failures travel: as exceptions inside the core, as Status where they are stored or handed to
// a caller.
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

// A failure for which one other rank is to blame: its link broke, it left, or it sent nonsense.
class PeerError : public Error {
 public:
  PeerError(hp_status code, int rank, const std::string& message)
      : Error(code, message), rank_(rank) {}

  int rank() const { return rank_; }

 private:
  int rank_;
};

// Ranks for a person to read: "rank 3", "ranks 0-2, 5". More than `limit` ranges are counted
// instead of listed.
std::string describe_ranks(std::vector<int> ranks, std::size_t limit = 16);

}  // namespace horoplug
