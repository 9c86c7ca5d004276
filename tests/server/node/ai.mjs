// A conversation through the Vercel AI SDK; prints what it understood, as JSON. Usage: node ai.mjs BASE_URL MODEL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "k2", baseURL: process.argv[2], apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(process.argv[3]);
const found = { seen: [] };

// two steps: the model calls the tool, the SDK runs it and goes on
const result = streamText({
  model,
  prompt: "read it",
  maxRetries: 0,
  stopWhen: stepCountIs(3),
  tools: {
    read: tool({
      description: "Read a file",
      inputSchema: z.object({ path: z.string() }),
      execute: async ({ path }) => {
        found.seen.push(path);
        return `text of ${path}`;
      },
    }),
  },
});
const kinds = new Set();
for await (const part of result.fullStream) {
  kinds.add(part.type);
  if (part.type === "error") throw part.error;
}
found.kinds = [...kinds].filter((kind) => ["reasoning-delta", "text-delta", "tool-call", "tool-result"].includes(kind)).sort();
const steps = await result.steps;
found.reasoning = steps[0].reasoningText;
found.calls = steps[0].toolCalls.map((call) => [call.toolCallId, call.toolName]);
found.finish = steps.map((step) => step.finishReason);
found.text = await result.text;
found.tokens = (await result.totalUsage).inputTokens > 0;

const object = await generateText({
  model, prompt: "an object", maxRetries: 0, output: Output.object({ schema: z.object({ n: z.number() }) }),
});
found.object = object.output;

console.log(JSON.stringify(found));
