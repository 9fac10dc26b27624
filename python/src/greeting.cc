#include "greeting.h"

#include <algorithm>

#include "comm/rounds.h"

namespace ringspan::python {
std::vector<Record> greet(Communicator& communicator, const Record& own, Communicator::Seconds deadline) {
  const int p = communicator.size();
  const int rank = communicator.rank();
  std::vector<Record> known(static_cast<std::size_t>(p));  // known[i]: of rank (rank + i) mod p
  known[0] = own;
  std::uint64_t round = kGreetingRounds;
  for (int distance = 1; distance < p; distance *= 2) {
    const int count = std::min(distance, p - distance);
    const auto bytes = static_cast<std::int64_t>(sizeof(Record)) * count;
    const Message batch[] = {
        {Message::Direction::send, (rank - distance + p) % p, known.data(), bytes},
        {Message::Direction::receive, (rank + distance) % p, known.data() + distance, bytes},
    };
    communicator.wait(communicator.post(round++, batch), deadline);
  }
  std::rotate(known.begin(), known.end() - rank, known.end());
  return known;
}

}  // namespace ringspan::python
