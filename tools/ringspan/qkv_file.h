// The input of `run`: q, k, v and what may come with them, in a safetensors file.
//
//   q             (batch, tokens, heads, head_dim)                     float32, bfloat16 or float16, all three the same
//   k             (batch, tokens_k, kv_heads, head_dim)
//   v             (batch, tokens_k, kv_heads, head_dim_v)
//   cu_seqlens    int32 (documents + 1); or cu_seqlens_q and cu_seqlens_k
//   sinks         float32 (heads)
//   alibi_slopes  float32 (heads) or (batch, heads)
// The two middle dimensions are swapped in the layout bhsd. A gradient file holds d_out (or do), shaped like o, and may hold
// dlse, float32 (batch, heads, tokens).
//
// The file stays mapped, and is read where it lies; a tensor that the file misaligns is copied by load(). Errors are FileError
// and begin with the path.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "problem_options.h"
#include "rank_work.h"

namespace ringspan::cli {

class QkvFile {
 public:
  explicit QkvFile(const std::string& path);

  // Sets shapes, dtype, documents, alibi and sinks of the problem. The layout: as asked, else as the metadata says, else bshd.
  void describe(ProblemOptions& options, std::optional<Layout> asked);
  // After describe(): the data of the inputs, too.
  void load();
  // The gradient of another file; checked against the problem.
  void attach_gradient(const std::string& path, const Problem& problem);

  const Inputs& inputs() const { return inputs_; }
  Inputs& inputs() { return inputs_; }
  Layout layout() const { return layout_; }
  // What a user should know: tensors that are not read, offsets that the pattern does not use.
  const std::vector<std::string>& notes() const { return notes_; }
  const io::SafetensorsReader& reader() const { return reader_; }

 private:
  static std::optional<Layout> stated_layout(const io::SafetensorsReader& reader);
  GlobalTensor tensor(const io::SafetensorsReader& reader, const std::string& name, bool per_row = false) const;
  static void load(const io::SafetensorsReader& reader, const std::string& name, GlobalTensor& tensor);
  std::vector<std::int32_t> offsets(const std::string& name) const;
  void describe_documents(ProblemOptions& options);
  void describe_heads_vectors(Problem& problem);

  io::SafetensorsReader reader_;
  std::optional<io::SafetensorsReader> gradient_reader_;
  Layout layout_ = Layout::bshd;
  Inputs inputs_;
  std::vector<std::string> notes_;
};

// Opens a file and turns what io throws into a FileError.
io::SafetensorsReader open_safetensors(const std::string& path);

// The name of a dtype in a file: F32, BF16, F16.
std::string_view file_dtype(DType dtype);

}  // namespace ringspan::cli
