// Connections that are made while the engine runs: the requests for them, which go to the program,
// and the connections that it returns.
//
// The core opens no connections. A large job gives each rank connections to few ranks on other
// hosts at the start. When the engine first sends something to another one, it writes that rank's
// number to a socket. A thread of the program makes the connection, authenticates it and passes it
// to add(). The peer's engine gets the other end in the same way, without having asked for it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/doorbell.h"
#include "transport/fd.h"
#include "transport/mesh.h"

namespace horoplug {

class OnDemandConnections {
 public:
  // `requests`: a stream socket for the numbers of ranks, each an uint32_t; empty: all connections
  // exist from the start.
  OnDemandConnections(const Fd& requests, Mesh& mesh, Doorbell& doorbell)
      : requests_(requests), mesh_(mesh), doorbell_(doorbell) {}

  // ---- called by any thread

  // All connections to a rank, by lane.
  void add(int rank, std::vector<std::unique_ptr<Stream>> lanes);
  // A connection to this rank cannot be made.
  void fail(int rank, const std::string& reason);
  // Whether the loop has to wake up for one of these calls.
  bool waiting() const { return waiting_.load(); }

  // ---- the thread that runs the loop

  // Asks for the connections that the mesh needs, and gives it those that were added. Returns
  // whether there were any.
  bool run();

 private:
  struct Result {
    int rank;
    std::vector<std::unique_ptr<Stream>> lanes;
    std::string failure;  // empty: `lanes` are connected
  };
  void push(Result result);
  void ask();
  bool take();

  const Fd& requests_;
  Mesh& mesh_;
  Doorbell& doorbell_;
  std::vector<int> unasked_;  // the socket was full

  std::mutex mutex_;
  std::vector<Result> results_;        // under the lock
  std::atomic<bool> waiting_ = false;  // whether there are results
};

}  // namespace horoplug
