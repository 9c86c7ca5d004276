// A conversation through openai-node; prints what the client understood, as JSON. Usage: node openai.mjs BASE_URL
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "read it" }];
const tools = [{
  type: "function",
  function: {
    name: "read-file.v2",
    description: "Read a file",
    parameters: { type: "object", properties: { path: { type: "string" } }, required: ["path"] },
  },
}];
const found = {};

const plain = await client.chat.completions.create({ model, messages });
found.plain = { content: plain.choices[0].message.content, reasoning: plain.choices[0].message.reasoning_content };

// the helper throws on deltas that do not fit together
const stream = client.chat.completions.stream({
  model, messages, tools, stream_options: { include_usage: true },
});
let reasoning = "";
for await (const chunk of stream) reasoning += chunk.choices[0]?.delta?.reasoning_content ?? "";
const made = await stream.finalChatCompletion();
const message = made.choices[0].message;
found.tools = {
  reasoning,
  content: message.content,
  calls: message.tool_calls.map((call) => [call.id, call.function.name, call.function.arguments]),
  finish: made.choices[0].finish_reason,
  usage: made.usage.prompt_tokens > 0,
};

messages.push(message, ...message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "text" })));
const after = await client.chat.completions.create({ model, messages, tools });
found.after = after.choices[0].message.content;

const format = {
  type: "json_schema",
  json_schema: { name: "n", strict: true, schema: { type: "object", properties: { n: { type: "integer" } } } },
};
const parsed = await client.chat.completions.parse({ model, messages: messages.slice(0, 1), response_format: format });
found.parsed = parsed.choices[0].message.parsed;

const response = await client.responses.create({ model, input: "hello", stream: true });
found.response = "";
for await (const event of response) {
  if (event.type === "response.output_text.delta") found.response += event.delta;
  if (event.type === "response.completed") found.status = event.response.status;
}

try {
  await client.chat.completions.create({ model: "another", messages: messages.slice(0, 1) });
} catch (error) {
  found.error = [error.status, error.code, error.constructor.name];
}

console.log(JSON.stringify(found));
