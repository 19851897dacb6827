// writescope: what a person types. Flags only; each subcommand has a file of its own.
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/base/address.h"
#include "engine/base/command_line.h"
#include "server/cli/chat.h"
#include "server/cli/client.h"
#include "server/cli/doctor.h"
#include "server/cli/generate.h"
#include "server/cli/plan.h"
#include "server/cli/share.h"
#include "server/cli/status.h"
#include "server/cli/tokens.h"
#include "server/parse_units.h"
#include "server/version.h"

namespace writescope::cli {
namespace {

constexpr char kFooter[] =
    "Exit codes: 0 done, 1 a problem on this side, 2 wrong flags, 3 refused or failed by the "
    "worker,\n"
    "4 no worker answers, 5 --timeout passed, 130 interrupted. Addresses can also be set by\n"
    "WRITESCOPE_ADDRESS and WRITESCOPE_CONTROL_ADDRESS.";

// What the subcommand that was typed does; its flags are captured.
struct Action {
  std::function<int(const ClientOptions&)> run;
  // Ctrl-C is for an InterruptWatcher, which cancels the call; otherwise it ends the program.
  bool watches_interrupts = false;
};

// Lets CLI11 check sizes and times while it parses, with our own messages.
CLI::Validator Checked(std::function<absl::Status(const std::string&)> check) {
  return CLI::Validator(
      [check = std::move(check)](std::string& text) {
        const absl::Status status = check(text);
        return status.ok() ? std::string() : std::string(status.message());
      },
      "");
}
CLI::Validator IsSize() {
  return Checked([](const std::string& text) { return server::ParseByteSize(text).status(); });
}
CLI::Validator IsTime() {
  return Checked([](const std::string& text) { return server::ParseTimeSpan(text).status(); });
}
absl::Duration Time(const std::string& text) {
  return server::ParseTimeSpan(text).value_or(absl::ZeroDuration());
}
int64_t Size(const std::string& text) {
  return text.empty() ? 0 : server::ParseByteSize(text).value_or(0);
}

void AddSampling(CLI::App* app, SamplingFlags* flags) {
  app->add_option("-n,--max-tokens", flags->max_tokens, "Default: up to the context");
  app->add_option("--min-tokens", flags->min_tokens, "Before these nothing ends the text");
  app->add_option("-t,--temperature", flags->temperature, "0 is greedy; default 1");
  app->add_option("--top-k", flags->top_k, "Only the k most likely tokens; 0 is all");
  app->add_option("--top-p", flags->top_p, "The smallest set of this probability");
  app->add_option("--min-p", flags->min_p, "Relative to the most likely token");
  app->add_option("--seed", flags->seed, "The same seed gives the same tokens");
  app->add_option("--repetition-penalty", flags->repetition_penalty, "Divides seen tokens' logits");
  app->add_option("--presence-penalty", flags->presence_penalty, "Subtracted once");
  app->add_option("--frequency-penalty", flags->frequency_penalty,
                  "Subtracted for each occurrence");
  // One value each: more would be the prompt, and "[a,b]" would be two.
  app->add_option("--stop", flags->stop, "The text ends before it; may be repeated")
      ->allow_extra_args(false);
  app->add_option("--stop-token-id", flags->stop_token_ids,
                  "The text ends with it; may be repeated")
      ->allow_extra_args(false);
  app->add_flag("--ignore-eos", flags->ignore_eos, "Goes on through end-of-sequence tokens");
}

void AddGenerate(CLI::App& app, Action* action) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* sub = app.add_subcommand("generate", "Streams the answer to a prompt");
  CLI::Option* prompt = sub->add_option("prompt", flags->prompt, "The prompt; - or nothing: stdin");
  sub->add_option("-f,--file", flags->prompt_file, "Reads the prompt from a file")
      ->excludes(prompt);
  sub->add_flag("--token-ids", flags->token_ids, "Prompt and answer are token ids");
  sub->add_flag("--allow-special", flags->allow_special,
                "The prompt's text of special tokens stands for those tokens");
  sub->add_flag("--keep-special", flags->keep_special, "Shows special tokens in the answer");
  sub->add_flag("--no-bos", flags->no_bos, "No beginning-of-sequence token in front");
  sub->add_flag("--report", flags->report, "Who attended to what, on stderr, at the end");
  sub->add_option("--logprobs", flags->logprobs, "Each token's, with k alternatives, on stderr");
  sub->add_option("--request-id", flags->request_id, "For logs and for abort");
  AddSampling(sub, &flags->sampling);
  sub->callback([=] {
    *action = {[flags](const ClientOptions& client) { return RunGenerate(client, *flags); }, true};
  });
}

void AddChat(CLI::App& app, Action* action) {
  auto flags = std::make_shared<ChatFlags>();
  CLI::App* sub = app.add_subcommand("chat", "A conversation; each line of stdin is a turn");
  sub->add_option("--system", flags->system, "What the model is told first");
  sub->add_flag("--no-thinking", flags->no_thinking, "Asks a reasoning model to answer at once");
  sub->add_flag("--report", flags->report, "Who attended to what, after each answer");
  AddSampling(sub, &flags->sampling);
  sub->callback([=] {
    *action = {[flags](const ClientOptions& client) { return RunChat(client, *flags); }, true};
  });
}

void AddDoctor(CLI::App& app, Action* action) {
  CLI::App* sub = app.add_subcommand(
      "doctor", "Measures this machine and says how to start a worker; see doctor --help");
  sub->set_help_flag();  // The program that runs has its own.
  sub->allow_extras();
  sub->fallthrough(false);
  // Ctrl-C ends it: what is blocked here stays blocked in the program that takes this one's place.
  sub->callback([=] {
    *action = {
        [arguments = sub->remaining()](const ClientOptions&) { return RunDoctor(arguments); }};
  });
}

void AddStatus(CLI::App& app, Action* action) {
  auto watch = std::make_shared<bool>(false);
  auto interval = std::make_shared<std::string>("1s");
  CLI::App* sub = app.add_subcommand("status", "The live split by region and processor, as bars");
  sub->add_flag("-w,--watch", *watch, "Again and again until Ctrl-C");
  sub->add_option("--interval", *interval, "Of --watch")->check(IsTime());
  sub->callback([=] {
    *action = {[=](const ClientOptions& client) {
                 return RunStatus(client, *watch,
                                  std::max(Time(*interval), absl::Milliseconds(100)));
               },
               *watch};
  });
  auto service = std::make_shared<std::string>("writescope.v1.GenerationService");
  CLI::App* health = app.add_subcommand("health", "Exits with 0 when the worker serves");
  auto process = std::make_shared<bool>(false);
  health->add_option("--service", *service, "Full name");
  // The protocol spells it --service=, which nobody would guess.
  health->add_flag("--process", *process, "Asks whether the process lives, whatever it serves");
  health->callback([=] {
    *action = {
        [=](const ClientOptions& client) { return RunHealth(client, *process ? "" : *service); }};
  });
}

void AddShare(CLI::App& app, Action* action) {
  CLI::App* sub = app.add_subcommand("share", "The CPU's share of the spilled KV bytes");
  sub->require_subcommand(1);
  sub->add_subcommand("show", "The table in force, and whose it is")->callback([=] {
    *action = {RunShareShow};
  });
  auto flags = std::make_shared<ShareSetFlags>();
  auto span = std::make_shared<std::string>("1m");
  CLI::App* set = sub->add_subcommand("set", "One share for every step, for a time");
  set->add_option("share", flags->share, "In [0, 1]")->required();
  set->add_option("--for", *span, "The lease; afterwards the worker's own roofline")
      ->check(IsTime());
  set->callback([=] {
    *action = {[=](const ClientOptions& client) {
      flags->valid_for = Time(*span);
      return RunShareSet(client, *flags);
    }};
  });
  sub->add_subcommand("release", "Ends an operator's lease")->callback([=] {
    *action = {RunShareRelease};
  });
  auto pace = std::make_shared<double>(0);
  CLI::App* link =
      sub->add_subcommand("link-pace", "Sets the pace of the CPU device's simulated link");
  link->add_option("gbps", *pace, "10^9 bytes/s; 0 takes it off")->required();
  link->callback([=] {
    *action = {[=](const ClientOptions& client) { return RunLinkPace(client, *pace * 1e9); }};
  });
}

void AddTokens(CLI::App& app, Action* action) {
  auto flags = std::make_shared<TokenizeFlags>();
  CLI::App* tokenize = app.add_subcommand("tokenize", "Text to token ids, as generate reads it");
  CLI::Option* text = tokenize->add_option("text", flags->text, "The text; - or nothing: stdin");
  tokenize->add_option("-f,--file", flags->file, "Reads the text from a file")->excludes(text);
  tokenize->add_flag("--allow-special", flags->allow_special,
                     "Text of special tokens stands for those tokens");
  tokenize->add_flag("--no-bos", flags->no_bos, "No beginning-of-sequence token in front");
  tokenize->add_flag("--pieces", flags->pieces, "Each id with its bytes, one a line");
  tokenize->callback([=] {
    *action = {[flags](const ClientOptions& client) { return RunTokenize(client, *flags); }};
  });
  auto ids = std::make_shared<std::vector<std::string>>();
  auto keep = std::make_shared<bool>(false);
  CLI::App* detokenize = app.add_subcommand("detokenize", "Token ids to text");
  detokenize->add_option("ids", *ids, "Numbers; nothing: stdin");
  detokenize->add_flag("--keep-special", *keep, "Shows special tokens");
  detokenize->callback([=] {
    *action = {[=](const ClientOptions& client) {
      std::string text;
      for (const std::string& id : *ids) absl::StrAppend(&text, id, " ");
      return RunDetokenize(client, text, *keep);
    }};
  });
  app.add_subcommand("info", "The served model and its limits")->callback([=] {
    *action = {RunInfo};
  });
  auto id = std::make_shared<std::string>();
  CLI::App* abort = app.add_subcommand("abort", "Ends a request by its id");
  abort->add_option("request_id", *id, "Of the request to end")->required();
  abort->callback(
      [=] { *action = {[=](const ClientOptions& client) { return RunAbort(client, *id); }}; });
}

void AddPlan(CLI::App& app, Action* action) {
  struct Texts {
    std::string vram_budget;
    std::string host_budget;
    std::string kv_dtype = "bf16";
    std::string weights = "bf16";
  };
  auto flags = std::make_shared<PlanFlags>();
  auto texts = std::make_shared<Texts>();
  CLI::App* sub = app.add_subcommand(
      "plan", "Memory, share and tokens/s of a model on a machine, predicted; calls no worker");
  sub->add_option("model", flags->model_dir,
                  "A folder with config.json, such as "
                  "deploy/model-shapes/qwen3-30b-a3b")
      ->required();
  sub->add_option("profile", flags->profile,
                  "A machine profile, such as "
                  "deploy/machine-profiles/v100-pcie3.json")
      ->required();
  sub->add_option("-b,--batch", flags->batch_size, "Sequences decoded together")
      ->check(CLI::Range(1, 65536));
  sub->add_option("-c,--context", flags->context_tokens, "Tokens of each; may be repeated")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
      ->allow_extra_args(false);
  sub->add_option("--vram-budget", texts->vram_budget, "Instead of the profile's")->check(IsSize());
  sub->add_option("--host-budget", texts->host_budget, "Instead of the profile's")->check(IsSize());
  sub->add_option("--kv-dtype", texts->kv_dtype, "bf16 or f32")
      ->check(CLI::IsMember({"bf16", "f32"}));
  sub->add_option("--weights", texts->weights,
                  "bf16, or int4: routed experts in 4 bits, as the worker's flag")
      ->check(CLI::IsMember({"bf16", "int4"}));
  sub->callback([=] {
    flags->vram_budget_bytes = Size(texts->vram_budget);
    flags->host_budget_bytes = Size(texts->host_budget);
    flags->kv_dtype = texts->kv_dtype == "bf16" ? KvDtype::kBf16 : KvDtype::kF32;
    flags->weights = texts->weights == "bf16" ? WeightFormat::kBf16 : WeightFormat::kInt4;
    *action = {[flags](const ClientOptions&) { return RunPlan(*flags); }};
  });
}

// The exit code of an action that ended with `code`: half an answer is none.
int OutputTaken(int code) {
  if (code != kExitOk || (std::fflush(stdout) == 0 && std::ferror(stdout) == 0)) return code;
  return ReportLocalError("the output could not be written");
}

int Main(int argc, char** argv) {
  ClientOptions client;
  Action action;
  CLI::App app("Talks to a writescope-worker.", "writescope");
  app.set_version_flag("--version", absl::StrCat("writescope ", server::kVersion));
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("-a,--address,--server", client.address, "The worker's --listen")
      ->check(CheckServerAddress, "")
      ->envname("WRITESCOPE_ADDRESS");
  app.add_option("--control-address", client.control_address, "The worker's --control-listen")
      ->check(CheckServerAddress, "")
      ->envname("WRITESCOPE_CONTROL_ADDRESS");
  app.add_option("--timeout", client.timeout, "Of each call, such as 30s")->check(IsTime());
  AddGenerate(app, &action);
  AddChat(app, &action);
  AddDoctor(app, &action);
  AddStatus(app, &action);
  AddShare(app, &action);
  AddTokens(app, &action);
  AddPlan(app, &action);
  // CLI11 throws for errors and for --help alike.
  try {
    ParseArguments(app, {argv + 1, argv + argc});
  } catch (const CLI::Success& help) {
    app.exit(help);
    return OutputTaken(kExitOk);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "%s\nRun with --help for more information.\n",
                 ExplainMistake(app, error).c_str());
    return kExitUsage;
  }
  client.timeout_span = Time(client.timeout);
  if (action.watches_interrupts) {
    // Before gRPC starts threads, which inherit it.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  }
  return OutputTaken(action.run(client));
}

}  // namespace
}  // namespace writescope::cli

int main(int argc, char** argv) { return writescope::cli::Main(argc, argv); }
