// The openai client for Node: chat, stream, tools, parse, errors, cancellation.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import assert from "node:assert";
import path from "node:path";

const [url, model, folder] = process.argv.slice(2);
const require = createRequire(path.join(folder, "package.json"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a colour." }];

const answer = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
let text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
assert.strictEqual(text, answer.choices[0].message.content);

const tools = [{ type: "function", function: { name: "now", parameters: { type: "object", properties: {}, additionalProperties: false } } }];
const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 60 });
assert.strictEqual(called.choices[0].message.tool_calls[0].function.name, "now");

const schema = { type: "object", properties: { name: { type: "string", maxLength: 20 } }, required: ["name"], additionalProperties: false };
const formed = await client.chat.completions.parse({ model, messages, max_tokens: 80, temperature: 0,
  response_format: { type: "json_schema", json_schema: { name: "colour", schema, strict: true } } });
assert.strictEqual(typeof JSON.parse(formed.choices[0].message.content).name, "string");

const response = await client.responses.create({ model, input: "Name a colour.", max_output_tokens: 16 });
assert.ok(response.id.startsWith("resp_"));
await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), (error) => error.status === 404 && !!error.requestID);

const controller = new AbortController();
setTimeout(() => controller.abort(), 300);
await assert.rejects(client.chat.completions.create({ model, messages, max_tokens: 4000, ignore_eos: true }, { signal: controller.signal }));
console.log("openai for Node: ok");
