#include "help.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <string>
#include <string_view>

namespace ringspan::cli {
namespace {

constexpr std::size_t kNames = 28;   // width of the column of names
constexpr std::size_t kWidth = 100;  // of a page that goes into a file or a wide terminal
constexpr std::size_t kNarrowest = 60;

std::size_t page_width() {
  winsize window{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_col == 0) return kWidth;
  return std::clamp<std::size_t>(window.ws_col, kNarrowest, kWidth);
}

// "  name      words words\n            words\n"
std::string entry(const std::string& name, std::string_view description, std::size_t width) {
  std::string text = fmt::format("  {:<{}}", name, kNames - 2);
  if (name.size() + 4 > kNames) text += fmt::format("\n{:{}}", "", kNames);
  std::size_t column = kNames;
  while (!description.empty()) {
    const std::size_t end = std::min(description.find(' '), description.size());
    if (column > kNames && column + 1 + end > width) {
      text += fmt::format("\n{:{}}", "", kNames);
      column = kNames;
    } else if (column > kNames) {
      text += ' ';
      ++column;
    }
    text += description.substr(0, end);
    column += end;
    description.remove_prefix(std::min(end + 1, description.size()));
  }
  return text + "\n";
}

class HelpFormatter final : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode) const override {
    const std::size_t width = page_width();
    std::string page = fmt::format("{}\n\nusage: {}", app->get_description(), name);
    for (const CLI::Option* option : app->get_options()) {
      if (option->get_required()) page += fmt::format(" {}", usage_of(*option));
    }
    const auto subcommands = app->get_subcommands([](const CLI::App*) { return true; });
    page += subcommands.empty() ? " [options]\n" : " COMMAND [options]\n";
    for (const std::string& group : app->get_groups()) {
      const auto options = app->get_options([&](const CLI::Option* option) { return option->get_group() == group; });
      if (group.empty() || options.empty()) continue;
      page += fmt::format("\n{}\n", group == "Options" ? "options" : group);
      for (const CLI::Option* option : options) page += entry(title_of(*option), option->get_description(), width);
    }
    if (!subcommands.empty()) page += "\ncommands\n";
    for (const CLI::App* subcommand : subcommands) page += entry(subcommand->get_name(), subcommand->get_description(), width);
    if (!app->get_footer().empty()) page += fmt::format("\n{}\n", app->get_footer());
    return page;
  }

 private:
  static std::string usage_of(const CLI::Option& option) {
    return option.get_positional() ? option.get_name(true) : fmt::format("{} {}", option.get_name(), option.get_type_name());
  }
  static std::string title_of(const CLI::Option& option) {
    std::string name = option.get_positional() ? option.get_name(true) : option.get_name(false, true);
    std::replace(name.begin(), name.end(), ',', ' ');
    const bool has_value = !option.get_positional() && option.get_type_size() != 0;
    return has_value ? fmt::format("{} {}", name, option.get_type_name()) : name;
  }
};

}  // namespace

std::shared_ptr<CLI::FormatterBase> make_help_formatter() { return std::make_shared<HelpFormatter>(); }

}  // namespace ringspan::cli
