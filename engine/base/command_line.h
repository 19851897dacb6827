// Arguments of a program, made ready for CLI11.
#pragma once

#include <algorithm>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace writescope {

// "--flag=" as "--flag" and an empty value. CLI11 takes the former for a flag whose value comes
// next, and would swallow the argument behind it. What follows a lone "--" stays as it is.
std::vector<std::string> WithEmptyValues(const std::vector<std::string>& arguments);

// Of CheckNumbers' validator among those of an option.
inline constexpr char kNumberCheck[] = "number";

// Validators: empty, or what is wrong with `text`.
//
// A decimal number that fits uint64_t. CLI11 would make 2^64 - 1 of -1 and of whatever is too
// large.
std::string CheckUint64(const std::string& text);
// A decimal number that fits int64_t. CLI11 would make 0 of an empty text and 8 of "010".
std::string CheckInt64(const std::string& text);
// The same for uint32_t and int32_t.
std::string CheckUint32(const std::string& text);
std::string CheckInt32(const std::string& text);
// A number. CLI11 would make 0 of an empty text.
std::string CheckDouble(const std::string& text);

// "UINT", "INT", "FLOAT" or another; CLI11 has what its validators say of themselves behind a
// colon.
template <typename Option>
std::string ValueType(const Option& option) {
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(':'));
}

// Has the options of a CLI::App and of its subcommands that take numbers check them so. Call it
// when all options are there.
template <typename App>
void CheckNumbers(App& app) {
  for (auto* option : app.get_options()) {
    const std::string type = ValueType(*option);
    if (type == "UINT") option->check(CheckUint64, "", kNumberCheck);
    if (type == "INT") option->check(CheckInt64, "", kNumberCheck);
    if (type == "FLOAT") option->check(CheckDouble, "", kNumberCheck);
  }
  for (auto* subcommand : app.get_subcommands({})) CheckNumbers(*subcommand);
}

// Has the options whose variables have 32 bits name the range that these can hold. CLI11 does not
// say how wide a variable is, so each is given a number of 33 bits to see: for after a mistake,
// when nobody uses the variables any more.
template <typename App>
void NarrowNumbers(App& app) {
  for (auto* option : app.get_options()) {
    const std::string type = ValueType(*option);
    if (type != "UINT" && type != "INT") continue;
    option->clear();
    option->add_result("4294967296");
    try {
      option->run_callback();
    } catch (const std::exception& error) {
      if (!std::string_view(error.what()).starts_with("Could not convert")) continue;
      auto* const check = type == "UINT" ? CheckUint32 : CheckInt32;
      option->get_validator(kNumberCheck)->operation([check](std::string& text) {
        return check(text);
      });
    }
  }
  for (auto* subcommand : app.get_subcommands({})) NarrowNumbers(*subcommand);
}

// Has a CLI::App with all its options parse the arguments, without the program's name, by all of
// the above. Throws what CLI11 throws: for mistakes, and for --help and --version.
template <typename App>
void ParseArguments(App& app, const std::vector<std::string>& arguments) {
  CheckNumbers(app);
  std::vector<std::string> words = WithEmptyValues(arguments);
  std::reverse(words.begin(), words.end());  // The order that this overload of parse wants.
  try {
    app.parse(std::vector<std::string>(words));
  } catch (const std::exception&) {
    NarrowNumbers(app);
    app.parse(std::move(words));  // The same mistake, with what it should have been.
  }
}

// What is wrong with an argument that is expected nowhere, with the flag or subcommand that may
// have been meant. The flags are those of the program and of the subcommands that were typed;
// subcommands are those that could stand here.
std::string ExplainUnexpected(const std::string& argument, const std::vector<std::string>& flags,
                              const std::vector<std::string>& subcommands);

// What ParseArguments threw, in words that name what is wrong. CLI11 lists unexpected arguments
// from the last on, and of a misspelt subcommand, or flag that has to be there, says only that it
// lacks.
template <typename App, typename Error>
std::string ExplainMistake(const App& app, const Error& error) {
  std::string what = error.what();
  const bool lacks = error.get_name() == "RequiredError";
  const bool has_more = what.starts_with("The following argument");  // Its name is the program's.
  // Numbers are checked before they are converted; what is left are flags.
  constexpr std::string_view kNoFlagValue = "Could not convert: ";
  if (what.starts_with(kNoFlagValue)) {
    return what.substr(kNoFlagValue.size()) + " is neither true nor false";
  }
  std::vector<std::string> unexpected = app.remaining(/*recurse=*/true);
  std::erase(unexpected, "--");
  if (unexpected.empty() || (!lacks && !has_more)) return what;
  std::vector<std::string> flags;
  const App* at = &app;
  for (;;) {
    for (const auto* option : at->get_options()) {
      for (const std::string& name : option->get_snames()) flags.push_back("-" + name);
      for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
    }
    const auto typed = at->get_subcommands();
    if (typed.empty()) break;
    at = typed.back();
  }
  std::vector<std::string> subcommands;
  for (const auto* sub : at->get_subcommands({})) subcommands.push_back(sub->get_name());
  return ExplainUnexpected(unexpected.front(), flags, subcommands);
}

}  // namespace writescope
